# pyright: strict
"""A trainer and a rollout side by side: what ``dovetail mismatch`` reads.

Owns ``Comparison`` and its file: the logprobs that the rollout and one or more forwards of the
trainer (the *arms*, such as "live" and "replayed") gave the same tokens, and in which layers and
tokens their routers differ. Measures are those of ``mismatch``.

The file is one msgpack map: ``format`` ("dovetail.mismatch"), ``version`` (1), ``title``, ``arms``
(names), ``layer_ids``, ``num_experts_per_tok``, and ``sequences``, each a map of ``start``,
``rollout`` and ``arms`` (raw little-endian float32, one array for each name), ``mask`` (a byte a
token) and ``overlap`` (a byte for each row and layer, C order; empty if there are no routes).

Shape legend: R response tokens of a sequence, T its rows of routes, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.replay.mismatch import Mismatch, as_array, measure_mismatch, survival

FORMAT, VERSION = "dovetail.mismatch", 1

Floats = NDArray[np.float32]


class _Sequence(msgspec.Struct, kw_only=True):
    start: int
    rollout: bytes
    arms: list[bytes]
    mask: bytes
    overlap: bytes


class _Head(msgspec.Struct, kw_only=True):
    format: str
    version: int


class _File(msgspec.Struct, kw_only=True):
    format: str
    version: int
    title: str
    arms: list[str]
    layer_ids: list[int]
    num_experts_per_tok: int
    sequences: list[_Sequence]


@dataclass(frozen=True, slots=True, eq=False)
class ComparedSequence:
    """One sequence.

    Attributes:
        start: position of its first token that has logprobs, as a rule the length of the prompt.
        rollout: float32 [R], of the engine.
        arms: name -> float32 [R], of the trainer.
        mask: bool [R], tokens that count.
        overlap: uint8 [T, L], experts that rollout and live trainer have in common; row t is of
            the token at position t as input. None without routes.
    """

    start: int
    rollout: Floats
    arms: dict[str, Floats]
    mask: NDArray[np.bool_]
    overlap: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Many sequences, under the same arms.

    Attributes:
        sequences: at least one.
        layer_ids: of the L layers of ``overlap``; empty without routes.
        num_experts_per_tok: experts of a token in a layer; 0 without routes.
        title: what was compared, for people.

    Raises:
        ValueError: the sequences do not have the same arms, shapes do not fit, no token counts, or
            a logprob that counts is not finite.
    """

    sequences: tuple[ComparedSequence, ...]
    layer_ids: tuple[int, ...] = ()
    num_experts_per_tok: int = 0
    title: str = ""

    def __post_init__(self) -> None:
        _expect(len(self.sequences) > 0, "there are no sequences")
        names = self.arm_names
        _expect(len(names) > 0, "there are no arms")
        _expect(
            not self.layer_ids or self.num_experts_per_tok > 0,
            f"num_experts_per_tok is {self.num_experts_per_tok}, though there are routes",
        )
        for number, sequence in enumerate(self.sequences):
            where = f"sequence {number}"
            _expect(list(sequence.arms) == names, f"{where} has the arms {list(sequence.arms)}")
            size = len(sequence.rollout)
            for name, values in (*sequence.arms.items(), ("mask", sequence.mask)):
                _expect(
                    values.shape == (size,),
                    f"{where}: {name} is {values.shape}, the rollout has {size} tokens",
                )
            for name, values in (("rollout", sequence.rollout), *sequence.arms.items()):
                bad = int((~np.isfinite(values[sequence.mask])).sum())
                _expect(
                    bad == 0,
                    f"{where}: {name} has {bad} logprobs that count and are not finite; leave them "
                    "out by masks=, or look for what went wrong",
                )
            overlap = sequence.overlap
            _expect(
                (overlap is not None) == bool(self.layer_ids),
                f"{where}: overlap and layer_ids belong together",
            )
            if overlap is None:
                continue
            _expect(
                overlap.ndim == 2 and overlap.shape[1] == len(self.layer_ids),
                f"{where}: overlap is not [rows, {len(self.layer_ids)} layers]",
            )
            most, k = int(overlap.max(initial=0)), self.num_experts_per_tok
            _expect(most <= k, f"{where}: overlap of {most} experts of {k}")
        _expect(any(one.mask.any() for one in self.sequences), "no token counts; masks are empty")

    @classmethod
    def of_arrays(
        cls,
        rollout: Sequence[Any],
        arms: dict[str, Sequence[Any]],
        *,
        starts: Sequence[int],
        masks: Sequence[Any] | None = None,
        overlaps: Sequence[Any] | None = None,
        layer_ids: Sequence[int] = (),
        num_experts_per_tok: int = 0,
        title: str = "",
    ) -> "Comparison":
        """Make a comparison of lists with one array, or tensor, a sequence.

        Args:
            rollout: logprobs [R] of each sequence; gradients are left alone.
            arms: the same of each forward of the trainer.
            starts: position of the first of these tokens.
            masks: [R], tokens that count; None is all of them.
            overlaps: [T, L], see ``ComparedSequence``: of ``live.compare_traces``, or the rows of
                ``LiveRouting.overlap_NL``.
            layer_ids, num_experts_per_tok, title: see the class.

        Raises:
            ValueError: as the class, or lists have other lengths.
        """
        given = {"starts": starts, "masks": masks, "overlaps": overlaps} | arms
        for name, values in given.items():
            _expect(
                values is None or len(values) == len(rollout),
                f"{name} has {0 if values is None else len(values)} sequences, the rollout "
                f"{len(rollout)}",
            )
        sequences: list[ComparedSequence] = []
        for number in range(len(rollout)):
            own = as_array(rollout[number]).astype(np.float32)
            mask = np.ones(len(own), bool) if masks is None else as_array(masks[number]) != 0
            sequences.append(
                ComparedSequence(
                    start=starts[number],
                    rollout=own,
                    arms={
                        name: as_array(values[number]).astype(np.float32)
                        for name, values in arms.items()
                    },
                    mask=mask,
                    overlap=(
                        None if overlaps is None else as_array(overlaps[number]).astype(np.uint8)
                    ),
                )
            )
        return cls(tuple(sequences), tuple(layer_ids), num_experts_per_tok, title)

    # -- asking --------------------------------------------------------------------------

    @property
    def arm_names(self) -> list[str]:
        """Forwards of the trainer, in order."""
        return list(self.sequences[0].arms)

    def measure(self, arm: str, **options: Any) -> Mismatch:
        """Return the measures of an arm; options are those of ``measure_mismatch``."""
        train, rollout, mask, number = self._flat(arm)
        return measure_mismatch(train, rollout, mask=mask, sequences=number, **options)

    def survival(self, arm: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the survival curve of an arm; see ``mismatch.survival``."""
        train, rollout, mask, _ = self._flat(arm)
        return survival(train, rollout, mask)

    def routes(self) -> dict[str, float]:
        """Return how the routers differ: see ``LiveRouting.summary``; empty without routes."""
        if not self.layer_ids:
            return {}
        overlap = np.concatenate([_overlap(one) for one in self.sequences])
        differs = overlap < self.num_experts_per_tok
        return {
            "router_diff": float(differs.mean()),
            "slot_overlap": float(overlap.mean() / self.num_experts_per_tok),
            "token_any_diff": float(differs.any(1).mean()),
            "layers_per_token": float(differs.sum(1).mean()),
        }

    def route_map(self, sequence: int | None = None) -> NDArray[np.float64]:
        """Return the share of sequences whose routers differ, [L, positions]; nan where none is.

        Args:
            sequence: of one alone; None is over all.
        """
        chosen = self.sequences if sequence is None else (self.sequences[sequence],)
        rows = max(len(_overlap(one)) for one in chosen)
        total, count = np.zeros((rows, len(self.layer_ids))), np.zeros((rows, 1))
        for one in chosen:
            overlap = _overlap(one)
            total[: len(overlap)] += overlap < self.num_experts_per_tok
            count[: len(overlap)] += 1
        return (total / np.where(count > 0, count, np.nan)).T

    def _flat(self, arm: str) -> tuple[Floats, Floats, NDArray[np.bool_], NDArray[np.intp]]:
        lengths = [len(one.rollout) for one in self.sequences]
        return (
            np.concatenate([one.arms[arm] for one in self.sequences]),
            np.concatenate([one.rollout for one in self.sequences]),
            np.concatenate([one.mask for one in self.sequences]),
            np.repeat(np.arange(len(lengths)), lengths),
        )

    # -- the file ------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written, or its folder is missing.
        """
        folder = Path(path).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {folder}; make it first")
        file = _File(
            format=FORMAT,
            version=VERSION,
            title=self.title,
            arms=self.arm_names,
            layer_ids=list(self.layer_ids),
            num_experts_per_tok=self.num_experts_per_tok,
            sequences=[
                _Sequence(
                    start=one.start,
                    rollout=_bytes(one.rollout),
                    arms=[_bytes(values) for values in one.arms.values()],
                    mask=one.mask.astype(np.uint8).tobytes(),
                    overlap=b"" if one.overlap is None else one.overlap.tobytes(),
                )
                for one in self.sequences
            ],
        )
        Path(path).write_bytes(msgspec.msgpack.encode(file))

    @staticmethod
    def load(path: str | Path) -> "Comparison":
        """Read what ``save`` wrote.

        Raises:
            ValueError: the file is something else, or does not hold together.
            OSError: it cannot be read.
        """
        data = Path(path).read_bytes()
        try:
            head = msgspec.msgpack.decode(data, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ValueError(
                "this is no comparison; Comparison.save of dovetail.replay.comparison writes one"
            ) from None
        _expect(head.format == FORMAT, f"this is a {head.format!r}, no {FORMAT}")
        _expect(head.version == VERSION, f"version {head.version}; this reads {VERSION}")
        try:
            file = msgspec.msgpack.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"this comparison does not hold together: {error}") from None
        _expect(len(set(file.arms)) == len(file.arms), "an arm is named twice")
        layers = len(file.layer_ids)
        sequences: list[ComparedSequence] = []
        for number, one in enumerate(file.sequences):
            parts = [one.rollout, *one.arms]
            is_whole = (
                len(one.arms) == len(file.arms)
                and all(len(part) % 4 == 0 for part in parts)
                and len(one.overlap) % max(layers, 1) == 0
            )
            _expect(is_whole, f"sequence {number} has bytes missing")
            rollout, *values = (np.frombuffer(part, dtype="<f4") for part in parts)
            overlap = np.frombuffer(one.overlap, dtype=np.uint8)
            sequences.append(
                ComparedSequence(
                    start=one.start,
                    rollout=rollout,
                    arms=dict(zip(file.arms, values, strict=True)),
                    mask=np.frombuffer(one.mask, dtype=np.uint8).astype(bool),
                    overlap=overlap.reshape(-1, layers) if layers else None,
                )
            )
        return Comparison(
            tuple(sequences), tuple(file.layer_ids), file.num_experts_per_tok, file.title
        )


def _overlap(sequence: ComparedSequence) -> NDArray[np.uint8]:
    assert sequence.overlap is not None
    return sequence.overlap


def _bytes(values: Floats) -> bytes:
    return values.astype("<f4").tobytes()


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
