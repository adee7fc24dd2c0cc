"""The trainer's side: what was recorded about each token, and how to train with it.

Needs numpy, torch and msgspec alone (``records`` not even torch). docs/replay.md shows all of it.

    records      the experts of a sequence's tokens, as an engine hands them over
    files        the same out of an engine on this machine, through memory that both map
    layout       padding, packing, slicing: any per-token values
    packing      from traces to the routes of a micro-batch, by an index of tokens
    session      recording and replaying in a Hugging Face model
    live         what its own routers would have chosen
    megatron     the same through Megatron-Core's RouterReplay
    masks        logprobs under sampling masks
    weights      importance weights
    mismatch     how far trainer and rollout are apart
    comparison   the file that ``dovetail mismatch`` reads
    topk, routers, interception, attachment     how a model's routers are found and answered
"""
