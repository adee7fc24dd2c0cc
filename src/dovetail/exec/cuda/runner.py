"""The compute lane's part of a step on a GPU: read-outs, forward, draws, scores.

Owns the device memory (KV, slot state, inputs) and is its only writer. Every method runs as work of
the compute lane, so in order, and launches without waiting; what the host must know it takes from
the plan. Only steps that need more than the plain draw read lengths back.

Shape legend: T tokens, R rows, N rows that sample, M model dim, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.attention.backend import ForwardContext
from dovetail.attention.tiled import TiledAttention
from dovetail.capture.direct import DirectRecorder
from dovetail.config.schema import EngineConfig
from dovetail.exec.cuda.graphs import StepGraphs
from dovetail.exec.cuda.pack import pack
from dovetail.exec.cuda.step import Forwarded, SlotTensors, StepShape, StepTensors, step_shape
from dovetail.exec.cuda.tenants import Tenants
from dovetail.exec.cuda.unpack import Unpacker
from dovetail.exec.device import Device
from dovetail.exec.kv import KVStore
from dovetail.exec.packet import packet_schema
from dovetail.exec.readback import RESULT_WORDS, PayloadLayout, PayloadSlice
from dovetail.exec.scores import ScoredStep, ScoreWriter
from dovetail.kernels import api
from dovetail.kernels.backend import Kernels, PlainDraws, QueryTiles, WorkItems
from dovetail.models.causal_lm import CausalLM
from dovetail.sampling.sampler import History, draw
from dovetail.sched.plan import RowStatus, StepPlan


class DevicePayload:
    """A payload block on a device; a ``Payload``."""

    def __init__(self, block: Tensor) -> None:
        self._block = block

    def put(self, item: PayloadSlice, values: Tensor, *, at: int = 0) -> None:
        """See ``Payload``."""
        data = self._block[item.offset : item.offset + item.num_bytes]
        # Of unsigned integers torch copies few kinds; the bits are the same.
        dtype = {"u": values.dtype}.get(item.dtype.kind) or _torch_dtype(item.dtype)
        data.view(dtype).view(item.shape)[at : at + len(values)].copy_(values, non_blocking=True)


class CudaRunner:
    """Runs packets on the model; an ``exec.executor.Runner``."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        device: Device,
        kernels: Kernels,
        graphs: StepGraphs | None = None,
    ) -> None:
        where, geometry = device.torch_device, config.model
        self._config = config
        self._model = model
        self._kernels = kernels
        self._graphs = graphs
        self._heads = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)
        self._tile_tokens = kernels.tile_tokens(geometry.num_heads // geometry.num_kv_heads)
        self._kv = KVStore(config, device)
        self._slots = SlotTensors(config, where)
        self._inputs = StepTensors(
            config, where, tile_tokens=self._tile_tokens, sink=self._kv.sidecars["tokens"].sink
        )
        self._tenants = Tenants(config)
        self._scores = ScoreWriter(model, self._tenants.params)
        self._unpacker = Unpacker(
            schema=packet_schema(config),
            slots=self._slots,
            inputs=self._inputs,
            kv=self._kv,
            page_size=config.page_size,
            tile_tokens=self._tile_tokens,
        )
        device.register_state(*self._slots.tensors, *self._inputs.tensors)

    @torch.inference_mode()
    def read_out(self, layout: PayloadLayout, payload: Tensor) -> None:
        """Gather the columns of the plan's read-outs into the payload block."""
        block = DevicePayload(payload)
        for readout, slices in layout.readouts:
            self._tenants.check([readout.slot], [readout.generation])
            slots = self._slots_of(readout.slot, readout.end)[readout.start :]
            for column, item in slices.items():
                block.put(item, self._rows_at(column, slots))

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        packet: Tensor,
        layout: PayloadLayout,
        result: Tensor,
        payload: Tensor | None,
    ) -> None:
        """See ``Runner``."""
        self._tenants.apply(plan)
        self._unpacker.apply_writes(plan, packet)
        if not len(plan.rows):
            return  # read-outs alone
        self._tenants.check(plan.rows.slot, plan.rows.generation)
        shape = step_shape(plan, tile_tokens=self._tile_tokens)
        padded = None if self._graphs is None else self._graphs.padded(shape)
        self._unpacker.fill(plan, packet, padded or shape)
        if self._graphs is None or padded is None:
            forwarded = self.forward(shape)
        else:
            forwarded = self._graphs.replay(padded)
        draws = None
        if not self._tenants.draws_plainly(plan):
            draws = self._draw(plan, forwarded)
        pack(
            self._inputs,
            self._slots,
            forwarded.draws if draws is None else _by_row(draws, plan, forwarded.draws),
            forwarded.is_spoilt_T,
            result,
            num_rows=len(plan.rows),
        )
        if payload is not None:
            self._pack_snapshot(plan, layout, DevicePayload(payload))
            self._write_scores(plan, forwarded, draws, layout, DevicePayload(payload), result)

    @torch.inference_mode()
    def forward(self, shape: StepShape) -> Forwarded:
        """Forward what the inputs hold, and draw plainly for each row.

        Reads fixed addresses alone and waits for nothing, so a CUDA graph can hold it.
        """
        at, num_tokens, num_rows = self._inputs, shape.num_tokens, shape.num_rows
        kv_slots_T = at.kv_slots_T[:num_tokens]
        hidden_TM = self._model.hidden(
            ForwardContext(
                token_ids=at.token_ids_T[:num_tokens],
                positions=at.positions_T[:num_tokens],
                kv_slots=kv_slots_T,
                attention=TiledAttention(
                    self._kernels,
                    self._kv.k_LCKD,
                    self._kv.v_LCKD,
                    page_table_SB=self._slots.page_table_SB,
                    page_size=self._config.page_size,
                    kv_slots_T=kv_slots_T,
                    places_T=at.places_T[:num_tokens],
                    works=self._works(shape),
                ),
                recorder=DirectRecorder(self._kv.sidecars, kv_slots_T),
            )
        )
        logits_RV = self._model.logits(hidden_TM.index_select(0, at.last_R[:num_rows]))
        draws = self._kernels.sample_plain(
            logits_RV,
            temperature_N=at.temperature_R[:num_rows],
            seed_N=at.seed_R[:num_rows],
            position_N=at.end_R[:num_rows],
            sample_index_N=at.sample_index_R[:num_rows],
        )
        is_spoilt_T = ~torch.isfinite(hidden_TM.abs().amax(dim=-1))
        return Forwarded(hidden_TM, logits_RV, is_spoilt_T, draws)

    def _works(self, shape: StepShape) -> list[WorkItems]:
        """Divide the work of attention: decode rows, and prompt chunks."""
        at = self._inputs
        lists = [
            QueryTiles(at.decode_R4[: shape.num_decode], 1),
            QueryTiles(at.tiles_N4[: shape.num_tiles], self._tile_tokens),
        ]
        num_heads, num_kv_heads, head_dim = self._heads
        return [
            self._kernels.split_keys(
                queries, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
            )
            for queries in lists
            if len(queries.tiles_N4)
        ]

    def _draw(self, plan: StepPlan, forwarded: Forwarded) -> api.Draws | None:
        """Draw for the rows that sample, with all that may shape a draw; waits for lengths."""
        rows = np.flatnonzero(plan.rows.samples)
        if not len(rows):
            return None
        slots = plan.rows.slot[rows].astype(np.int64)
        ends = self._inputs.end_R[: len(plan.rows)].cpu().numpy()[rows]
        return draw(
            self._tenants.params,
            forwarded.logits_RV[self._indices(rows)],
            slots_N=slots,
            positions_N=ends,
            read_history=lambda chosen: self._history(slots[chosen], ends[chosen], chosen),
        )

    def _history(
        self, slots: NDArray[np.int64], ends: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> History:
        """Return all tokens so far of some sampling rows, from the token sidecar."""
        places = [self._slots_of(slot, end) for slot, end in zip(slots, ends, strict=True)]
        prompt_lens = self._tenants.params.columns["prompt_len"][slots]
        is_output = [np.arange(end) >= n for end, n in zip(ends, prompt_lens, strict=True)]
        where = self._inputs.end_R.device
        return History(
            row_S=self._indices(np.repeat(rows, ends)),
            token_S=self._rows_at("tokens", torch.cat(places)).long(),
            is_output_S=torch.from_numpy(np.concatenate(is_output)).to(where),
        )

    def _write_scores(
        self,
        plan: StepPlan,
        forwarded: Forwarded,
        draws: api.Draws | None,
        layout: PayloadLayout,
        payload: DevicePayload,
        result: Tensor,
    ) -> None:
        width = plan.rows.width
        step = ScoredStep(
            hidden_TM=forwarded.hidden_TM,
            first_token_R=np.cumsum(width) - width,
            slot_R=plan.rows.slot,
            targets=self._inputs.targets_T,
            draws=draws,
            draw_of_row_R=np.cumsum(plan.rows.samples) - 1,
        )
        words = result.view(torch.int32)[: RESULT_WORDS * self._config.max_running]
        status_R = words.view(RESULT_WORDS, -1)[2]
        for row in self._scores.write(step, layout, payload):
            is_ok = status_R[row] == RowStatus.OK
            status_R[row].masked_fill_(is_ok, int(RowStatus.LARGE_SUPPORT))

    def _pack_snapshot(self, plan: StepPlan, layout: PayloadLayout, payload: DevicePayload) -> None:
        """Copy the forward's rows into memory of the step, while nobody can write over them."""
        slots = self._inputs.kv_slots_T[: plan.num_tokens]
        for column, item in layout.snapshot.items():
            payload.put(item, slots if column == "kv_slots" else self._rows_at(column, slots))

    def _rows_at(self, column: str, slots: Tensor) -> Tensor:
        """Return a column's rows at some cache slots; unsigned ones as signed, bit for bit."""
        rows = self._kv.sidecars[column].rows
        if rows.dtype == torch.uint16:
            rows = rows.view(torch.int16)
        return rows.index_select(0, slots)

    def _slots_of(self, slot: int, num_tokens: int) -> Tensor:
        """Return the cache slots of a sequence's first tokens, int64."""
        size = self._config.page_size
        pages = self._slots.page_table_SB[slot, : -(-num_tokens // size)].long()
        offsets = torch.arange(size, device=pages.device)
        return (pages[:, None] * size + offsets).view(-1)[:num_tokens]

    def _indices(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._inputs.end_R.device)


def _by_row(draws: api.Draws | None, plan: StepPlan, plain: PlainDraws) -> PlainDraws:
    """Return the draws with one entry a row, as ``pack`` reads them."""
    if draws is None:
        return plain
    rows = torch.from_numpy(np.flatnonzero(plan.rows.samples)).to(draws.ids_N.device)
    return PlainDraws(
        *(
            of_row.index_copy(0, rows, of_draw)
            for of_row, of_draw in zip(
                plain,
                (draws.ids_N, draws.logprobs_N, draws.status_N, draws.log_total_N),
                strict=True,
            )
        )
    )


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
