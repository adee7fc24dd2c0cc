"""What a server is sent by mistake, and what it says: one table, which is also a page of the docs.

For a model of 2,048 token ids and a context of 2,048 tokens, and a body of at most 1 MiB.
"""

from typing import Any, NamedTuple

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"


class BadRequest(NamedTuple):
    """One mistake.

    Attributes:
        route: where it is sent.
        body: JSON, or the bytes as they are.
        param: the field that the error names.
        words: in its message.
        status: of the reply.
    """

    route: str
    body: dict[str, Any] | list[Any] | bytes
    param: str | None
    words: str
    status: int = 400


def native(param: str, words: str, **fields: Any) -> BadRequest:
    return BadRequest(GENERATE, {"text": "A", **fields}, param, words)


def sampling(param: str, words: str, **fields: Any) -> BadRequest:
    return native(f"sampling_params.{param}", words, sampling_params=fields)


def ids(words: str, *token_ids: Any, param: str = "input_ids") -> BadRequest:
    return BadRequest(GENERATE, {"input_ids": list(token_ids)}, param, words)


def raw(words: str, body: bytes, param: str | None = "body") -> BadRequest:
    return BadRequest(GENERATE, body, param, words)


def chat(param: str, words: str, status: int = 400, **fields: Any) -> BadRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return BadRequest(CHAT, {"messages": messages, **fields}, param, words, status)


def completion(param: str, words: str, status: int = 400, **fields: Any) -> BadRequest:
    return BadRequest(COMPLETIONS, {"prompt": "Hi", **fields}, param, words, status)


BAD_REQUESTS = [
    # bodies
    raw("not JSON", b""),
    raw("byte 1", b"{text}"),
    raw("trailing characters", b'{"text": "A"} x'),
    raw("must be a JSON object, not an array", b'[{"text": "A"}]'),
    raw("must be a JSON object, not null", b"null"),
    raw("must be a JSON object, not a number", b"7"),
    raw("nested too deeply", b'{"text": ' + b"[" * 100_000),
    raw("nested too deeply", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    raw("not JSON: invalid character (byte 400015)",  # too long to look for its field
        b'{"input_ids": [' + b"1," * 200_000 + b"NaN]}"),
    raw("not JSON", b'{"text": "\xff\xfe"}'),
    raw("not JSON", '{"text": "A"}'.encode("utf-16")),
    raw("finite", b'{"text": "A", "sampling_params": {"temperature": NaN}}',
        "sampling_params.temperature"),
    raw("finite", b'{"text": "A", "sampling_params": {"top_p": -Infinity}}',
        "sampling_params.top_p"),
    raw("finite", b'{"text": "A", "sampling_params": {"min_p": 1e999}}', "sampling_params.min_p"),
    raw("finite", b'{"text": "A", "priority": ' + b"9" * 5000 + b"}", "priority"),
    raw("lone surrogate", b'{"text": "A \\ud800 B"}', "text"),
    raw("lone surrogate", b'{"text": "A", "sampling_params": {"stop": ["\\udfff"]}}',
        "sampling_params.stop[0]"),
    # prompts
    BadRequest(GENERATE, {}, "text", "give one of text, input_ids and messages; there is none"),
    native("text", "there is text and input_ids", input_ids=[1]),
    BadRequest(GENERATE, {"text": ""}, "text", "empty"),
    BadRequest(GENERATE, {"text": []}, "text", "empty list"),
    BadRequest(GENERATE, {"text": ["A", ""]}, "text", "in item 1 of the batch"),
    BadRequest(GENERATE, {"text": 7}, "text", "got `int`"),
    BadRequest(GENERATE, {"text": ["A", None]}, "text[1]", "got `null`"),
    BadRequest(GENERATE, {"messages": [{"role": "user"}]}, "messages", "no content"),
    BadRequest(GENERATE, {"messages": []}, "messages", "empty"),
    BadRequest(GENERATE, {"text": "A " * 4000}, "input_ids", "context length"),
    BadRequest(GENERATE, {"text": "A " * 200_000}, "text",
               "400000 characters, more than the context length"),
    BadRequest(GENERATE, {"text": ["A"] * 5000}, "text", "has 5000 prompts; send at most 4224"),
    BadRequest(GENERATE, {"input_ids": [[1]] * 5000}, "input_ids", "send at most 4224 at once"),
    ids("empty"),
    ids("-1; legal ids are 0 to 2047", -1),
    ids("2048; legal ids", 2048),
    ids("legal ids", 2**31),
    ids("legal ids", 2**63),
    ids("legal ids", 10**30),
    ids("not an integer", 1.5),
    ids("not an integer", "7"),
    ids("not an integer", True),
    ids("not an integer", None),
    ids("item 0 is an object", {"role": "user", "content": "A"}),
    ids("item 1 is an object", [1], [2, {}]),
    ids("not an integer", "x" * 5000),
    ids("in item 1 of the batch", [1], []),
    ids("in item 1 of the batch", [1], [[2]]),
    ids("must be a list of token ids", [1], 2),
    BadRequest(GENERATE, {"input_ids": [1] * 2049}, "input_ids", "context length of 2048"),
    BadRequest(GENERATE, {"input_ids": "1,2"}, "input_ids", "got `str`"),
    # sampling parameters
    sampling("heat", "correct its name", heat=0.5),
    sampling("max_tokens", "correct its name", max_tokens=5),
    BadRequest(GENERATE, {"text": "A", "sampling_params": {"x" * 9000: 1}},
               "sampling_params." + "x" * 184 + "...", "xxx..."),
    sampling("temperature", "legal range", temperature=-1),
    sampling("temperature", "legal range", temperature="nan"),
    sampling("temperature", "expected `float`", temperature="hot"),
    sampling("temperature", "expected `float`", temperature=True),
    sampling("temperature", "expected `float`", temperature=[1]),
    sampling("top_p", "legal range", top_p=0),
    sampling("top_p", "legal range", top_p=1.5),
    sampling("top_k", "give -1 (all) or at least 1", top_k=0),
    sampling("top_k", "expected `int`", top_k=1.5),
    sampling("min_p", "legal range", min_p=-0.1),
    sampling("n", "legal range", n=0),
    sampling("n", "legal range", n=10**9),
    sampling("max_new_tokens", "cannot be negative", max_new_tokens=-1),
    sampling("max_new_tokens", "context length", max_new_tokens=2048),
    sampling("max_new_tokens", "context length", max_new_tokens=2**31 - 1),
    sampling("max_new_tokens", "context length", max_new_tokens=2**63),
    sampling("max_new_tokens", "expected `int | null`", max_new_tokens=1e18),
    sampling("max_new_tokens", "expected `int | null`", max_new_tokens="many"),
    sampling("min_new_tokens", "max_new_tokens, here 3", min_new_tokens=4, max_new_tokens=3),
    sampling("stop", "item 0 has 0 bytes", stop=""),
    sampling("stop", "at most 64", stop=["x"] * 65),
    sampling("stop[1]", "got `int`", stop=["a", 1]),
    sampling("stop_token_ids[0]", "got `null`", stop_token_ids=[None]),
    sampling("stop_token_ids", "legal ids", stop_token_ids=[2048]),
    sampling("logit_bias", "legal ids", logit_bias={"4096": 1}),
    sampling("logit_bias", "expected `int`", logit_bias={"x": 1}),
    sampling("logit_bias", "legal range", logit_bias={"5": 1e300}),
    sampling("sampling_seed", "2**64-1", sampling_seed=-1),
    sampling("sampling_seed", "2**64-1", sampling_seed=2**64),
    sampling("repetition_penalty", "legal range", repetition_penalty=0),
    sampling("json_schema", "not supported", json_schema='{"type": "object"}'),
    sampling("regex", "not supported", regex="a+"),
    sampling("ebnf", "not supported", ebnf="root ::= 'a'"),
    sampling("custom_params", "not supported", custom_params={"x": 1}),
    native("sampling_params", "expected `object | array | null`", sampling_params=3),
    native("sampling_params", "is a list, but there is one prompt", sampling_params=[{}, {}]),
    BadRequest(GENERATE, {"text": ["A", "B"], "sampling_params": [{}]}, "sampling_params",
               "has 1 entries for 2 prompts"),
    BadRequest(GENERATE, {"text": ["A", "B"], "sampling_params": [{}, {"top_p": 2}]},
               "sampling_params.top_p", "in item 1 of the batch"),
    BadRequest(GENERATE, {"text": ["A"] * 5, "sampling_params": {"n": 1024}}, "body",
               "asks for 5120 generations"),
    # what a reply should hold
    native("logprob_start_len", "give -1 for none", return_logprob=True, logprob_start_len=99),
    native("top_logprobs_num", "legal range", return_logprob=True, top_logprobs_num=129),
    native("top_logprobs_num", "lists at most 8388608", return_logprob=True, top_logprobs_num=128,
           sampling_params={"n": 64, "max_new_tokens": 1030}),
    BadRequest(GENERATE, {"text": ["A"] * 600, "return_logprob": True,
                          "token_ids_logprob": list(range(128))},
               "token_ids_logprob", "asks for up to 9830400 logprobs over all tokens and samples"),
    native("token_ids_logprob", "legal ids", return_logprob=True, token_ids_logprob=[9999]),
    native("token_ids_logprob[0]", "got `str`", return_logprob=True, token_ids_logprob=["x"]),
    native("token_ids_logprob", "mixes ids", return_logprob=True, token_ids_logprob=[0, []]),
    native("return_logprob", "got `str`", return_logprob="maybe"),
    native("stream", "expected `bool`", stream="maybe"),
    native("priority", "expected `int`", priority="first"),
    native("rid", "got `int`", rid=5),
    native("rid", "at most 1024", rid="x" * 2000),
    native("group", "has 2000 characters; at most 1024", group="x" * 2000),
    native("extra_key", "at most 1024", extra_key="x" * 2000),
    native("cache_salt", "at most 1024", cache_salt="x" * 2000),
    BadRequest(GENERATE, {"text": ["A", "B"], "rid": ["x"]}, "rid", "has 1 entries for 2"),
    # what this engine cannot do
    native("return_routed_experts", "start it with --capture experts", return_routed_experts=True),
    native("capture", "start it with --capture experts", capture=["experts"]),
    native("capture", "'nope' is no column; the columns are tokens", capture="nope"),
    native("logprob_kind", "legal are scaled, raw, truncated", logprob_kind="best"),
    native("routed_experts_start_len", "legal range", routed_experts_start_len=99),
    native("routed_experts_start_len", "legal range", routed_experts_start_len=-1),
    native("capture_interval", "number of rows", capture=["tokens"], capture_interval=-1),
    native("capture_file", "takes the columns that capture names", capture_file="x"),
    native("capture_file", "start it with --capture-files", capture=["tokens"], capture_file="x"),
    BadRequest("/register_capture_file", {}, "capture_file", "start it with --capture-files"),
    BadRequest("/register_capture_file", {"num_slots": "many"}, "num_slots", "expected `int`"),
    BadRequest("/acknowledge_capture", {"capture_file": "x"}, "slots", "is missing"),
    BadRequest("/acknowledge_capture", {"capture_file": "x", "slots": [{"slot": 1}]},
               "slots[0].generation", "is missing"),
    native("return_sampling_mask", "more than 512 ids; give top_k of 512 at most",
           return_sampling_mask=True, sampling_params={"top_k": 600, "temperature": 9}),
    native("return_sampling_mask", "expected `bool`", return_sampling_mask="maybe"),
    native("return_hidden_states", "not supported", return_hidden_states=True),
    native("lora_path", "not supported", lora_path="my-adapter"),
    native("image_data", "not supported", image_data=["data:image/png;base64,AA"]),
    native("session_params", "not supported", session_params={"id": "s"}),
    native("custom_logit_processor", "not supported", custom_logit_processor="x"),
    native("input_embeds", "not supported", input_embeds=[[0.5]]),
    raw("not supported", b'{"text": "A", "image_data": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
        "image_data"),
    raw("not supported", b'{"text": "A", "sampling_params": {"regex": ' + b"[" * 900 + b"1"
        + b"]" * 900 + b"}}", "sampling_params.regex"),
    BadRequest("/abort_request", {}, "rid", "is missing"),
    BadRequest("/abort_request", {"rid": ""}, "rid", "is missing"),
    # chats
    BadRequest(CHAT, {}, "messages", "missing"),
    BadRequest(CHAT, b"{", "body", "not JSON"),
    BadRequest(CHAT, {"messages": []}, "messages", "at least one"),
    BadRequest(CHAT, {"messages": "Hi"}, "messages", "got `str`"),
    BadRequest(CHAT, {"messages": ["Hi"]}, "messages[0]", "got `str`"),
    BadRequest(CHAT, {"messages": [{"content": "Hi"}]}, "messages", "no role"),
    BadRequest(CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
    BadRequest(CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages[0].content[0]", "no text part"),
    chat("model", "does not exist", 404, model="gpt-5"),
    chat("model", "xxx...", 404, model="x" * 9000),
    chat("tools", "not supported", tools=[{"type": "function", "function": {"name": "f"}}]),
    chat("response_format", "not supported", response_format={"type": "json_object"}),
    chat("heat", "no field of this route", heat=0.5),
    chat("max_tokens", "context length", max_tokens=5000),
    chat("max_tokens", "cannot be negative", max_tokens=-1),
    chat("max_completion_tokens", "max_completion_tokens: is -1", max_completion_tokens=-1),
    BadRequest(CHAT, {"messages": [{"role": "user", "content": "A " * 200_000}]}, "messages",
               "characters, more than the context length"),
    chat("temperature", "legal range", temperature=-0.5),
    chat("logit_bias", "legal ids", logit_bias={"99999": 1}),
    chat("top_logprobs", "needs logprobs", top_logprobs=2),
    chat("top_logprobs", "legal range", logprobs=True, top_logprobs=200),
    chat("top_logprobs", "lists at most 8388608", logprobs=True, top_logprobs=128, n=64),
    chat("n", "legal range", n=0),
    chat("seed", "2**64-1", seed=-5),
    chat("stream_options", "unknown field", stream=True, stream_options={"include_use": True}),
    chat("continue_final_message", "not supported", continue_final_message=True),
    # completions
    BadRequest(COMPLETIONS, {}, "prompt", "missing"),
    completion("model", "does not exist", 404, model=""),
    completion("logprobs", "lists at most 8388608", logprobs=128, n=64, max_tokens=1030),
    completion("prompt", "empty", prompt=""),
    completion("prompt", "empty list", prompt=[]),
    completion("prompt", "legal ids", prompt=[5000]),
    completion("prompt", "in prompt 1", prompt=["A", 5]),
    completion("prompt", "item 1 is an object", prompt=[[5, {}]]),
    completion("suffix", "not supported", suffix="end"),
    completion("best_of", "not supported", best_of=2),
    completion("logprobs", "legal range", logprobs=1000),
    BadRequest(COMPLETIONS, {"prompt": ["A"] * 5000}, "prompt", "send at most 4224 at once"),
    completion("max_tokens", "context length", max_tokens=2048),
]  # fmt: skip
