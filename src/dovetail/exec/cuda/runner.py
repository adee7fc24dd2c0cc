"""The compute lane's part of a step on a GPU: read-outs, forward, draws, scores.

Owns the device memory (KV, slot state, inputs) and is its only writer. Every method runs as work of
the compute lane, so in order, and launches without waiting; what the host must know it takes from
the plan.

Shape legend: T tokens, R rows, M model dim, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from dovetail.attention.backend import ForwardContext
from dovetail.attention.tiled import TiledAttention
from dovetail.capture.direct import DirectRecorder
from dovetail.config.schema import EngineConfig
from dovetail.exec.blocks import step_blocks
from dovetail.exec.cuda.arena import PlainStepMemory, StepMemory
from dovetail.exec.cuda.graphs import StepGraphs
from dovetail.exec.cuda.pack import pack
from dovetail.exec.cuda.packets import Packets
from dovetail.exec.cuda.rows import RowCopies
from dovetail.exec.cuda.shaped import ShapedDraws
from dovetail.exec.cuda.shaped_graphs import ShapedGraphs
from dovetail.exec.cuda.step import Forwarded, SlotTensors, StepShape, StepTensors, step_shape
from dovetail.exec.cuda.tenants import Tenants
from dovetail.exec.cuda.unpack import Unpacker
from dovetail.exec.device import Device
from dovetail.exec.kv import KVStore
from dovetail.exec.packet import packet_schema
from dovetail.exec.readback import RESULT_WORDS, PayloadLayout, PayloadSlice
from dovetail.exec.scores import ScoredStep, ScoreWriter
from dovetail.kernels.backend import Kernels, PlainDraws, QueryTiles, WorkItems
from dovetail.models.causal_lm import CausalLM
from dovetail.sched.plan import RowStatus, StepPlan


class DevicePayload:
    """A payload block on a device; a ``Payload``."""

    def __init__(self, block: Tensor) -> None:
        self._block = block

    def put(self, item: PayloadSlice, values: Tensor, *, at: int = 0) -> None:
        """See ``Payload``."""
        data = self._block[item.offset : item.offset + item.num_bytes]
        # Of unsigned integers torch copies few kinds; the bits are the same.
        dtype = values.dtype
        if item.dtype.kind != "u":
            dtype = torch.from_numpy(np.empty(0, dtype=item.dtype)).dtype
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
        shaped_graphs: ShapedGraphs | None = None,
        memory: StepMemory | None = None,
    ) -> None:
        where, geometry = device.torch_device, config.model
        self._config = config
        self._model = model
        self._kernels = kernels
        self._graphs = graphs
        self.blocks = step_blocks(config, device)
        self._shaped_graphs = shaped_graphs
        self._memory = memory or PlainStepMemory("nobody asked for a reserve")
        self._heads = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)
        self._tile_tokens = kernels.tile_tokens(geometry.num_heads // geometry.num_kv_heads)
        self._kv = KVStore(config, device)
        self._slots = SlotTensors(config, where)
        self._inputs = StepTensors(
            config, where, tile_tokens=self._tile_tokens, sink=self._kv.sidecars["tokens"].sink
        )
        self._tenants = Tenants(config)
        self._scores = ScoreWriter(model, self._tenants.params.columns, self._slots.report_ids)
        self._shaped = ShapedDraws(
            self._slots,
            self._inputs,
            tokens_C=self._kv.sidecars["tokens"].rows,
            page_size=config.page_size,
            kernels=kernels,
            vocab_size=geometry.vocab_size,
        )
        schema = packet_schema(config)
        self._packets = Packets(self.blocks.packets, where)
        self._copies = RowCopies(
            self._packets.words,
            schema,
            self._slots,
            self._kv.sidecars,
            page_size=config.page_size,
        )
        self._unpacker = Unpacker(
            packet=self._packets.words,
            schema=schema,
            slots=self._slots,
            inputs=self._inputs,
            kv=self._kv,
            page_size=config.page_size,
            tile_tokens=self._tile_tokens,
        )
        device.register_state(
            self._packets.words,
            *self._slots.tensors,
            *self._inputs.tensors,
            *self._shaped.tensors,
        )

    @property
    def graphs(self) -> StepGraphs | None:
        """Who replays recorded steps; None if each is launched kernel by kernel."""
        return self._graphs

    @torch.inference_mode()
    def read_out(self, plan: StepPlan, layout: PayloadLayout, payload: Tensor) -> None:
        """See ``Runner``."""
        self._tenants.check(
            [readout.slot for readout in plan.readouts],
            [readout.generation for readout in plan.readouts],
        )
        self._packets.peek()
        self._copies.read_out(layout, payload)

    def run(
        self, plan: StepPlan, layout: PayloadLayout, result: Tensor, payload: Tensor | None
    ) -> None:
        """See ``Runner``."""
        self._memory.settle()
        self._tenants.apply(plan)
        if self._unpacker.has_to_install(plan):
            self._packets.peek()
            self._unpacker.install(plan)
        if not len(plan.rows):  # read-outs alone
            self._packets.take()
            self._unpacker.write_pages()
            return
        is_shaped = self._tenants.are_shaped(plan.rows)
        shape = step_shape(plan, tile_tokens=self._tile_tokens)
        forwarded = None
        if self._graphs is not None:
            shape = self._graphs.padded(shape)
            forwarded = self._graphs.replay(shape)
        if forwarded is None:
            forwarded = self.step_alone(shape)
        if payload is not None:  # scores of drawn tokens need what a shaped draw leaves
            is_shaped |= any(not score.is_prompt for score in plan.scores)
        if is_shaped or payload is not None:
            self._report(plan, shape, forwarded, is_shaped, layout, result, payload)

    @torch.inference_mode()
    def step(self, shape: StepShape) -> Forwarded:
        """Run the step of the next packet, padded to a shape; its rows draw plainly.

        Reads and writes fixed addresses alone and waits for nothing, so a CUDA graph can hold it.
        """
        self._packets.take()
        self._unpacker.write_pages()
        self._unpacker.fill(shape)
        forwarded = self._forward(shape)
        self._pack(forwarded.draws, forwarded.is_spoilt_T)
        return forwarded

    def step_alone(self, shape: StepShape) -> Forwarded:
        """Run a step unrecorded, in the memory of steps, which holds what it returns."""
        return self._memory.run(self.step, shape)

    @torch.inference_mode()
    def _report(
        self,
        plan: StepPlan,
        shape: StepShape,
        forwarded: Forwarded,
        is_shaped: bool,
        layout: PayloadLayout,
        result: Tensor,
        payload: Tensor | None,
    ) -> None:
        """Draw again what something shapes, and write what is asked for beside tokens."""
        draws = None
        if is_shaped:
            draws = self._draw_shaped(shape, forwarded)
        if payload is not None:
            self._pack_snapshot(plan, layout, payload)
            block = DevicePayload(payload)
            self._memory.run(self._write_scores, plan, forwarded, draws, layout, block, result)

    def _forward(self, shape: StepShape) -> Forwarded:
        """Forward what the inputs hold, and draw plainly for each row."""
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

    def _pack(self, draws: PlainDraws, is_spoilt_T: Tensor) -> None:
        words, results = self._packets.words, self.blocks.results
        pack(self._inputs, self._slots, draws, is_spoilt_T, packet=words, results=results)

    @torch.inference_mode()
    def draw_shaped(self, forwarded: Forwarded) -> PlainDraws:
        """Draw again for the step that the inputs hold, with all that its rows ask for, and pack.

        Can be recorded as ``step`` can.
        """
        draws = self._shaped.draw(forwarded.logits_RV)
        self._pack(draws, forwarded.is_spoilt_T)
        return draws

    def draw_alone(self, forwarded: Forwarded) -> PlainDraws:
        """Draw shaped, unrecorded, in the memory of steps."""
        return self._memory.run(self.draw_shaped, forwarded)

    @torch.inference_mode()
    def rehearse(self, num_tokens: int) -> None:
        """Run a step of so many tokens and as many rows as there can be, with all they may ask for.

        Before the first packet, so all of it is padding: nothing that anybody reads is written.
        """
        num_rows = self._config.max_running
        num_tiles = num_rows + -(-num_tokens // self._tile_tokens)
        forwarded = self.step(StepShape(num_rows, num_tokens, num_rows, num_tiles))
        draws = self._shaped.draw(forwarded.logits_RV)
        self._scores.rehearse(forwarded.hidden_TM, self._shaped.spread(forwarded.logits_RV, draws))

    def _draw_shaped(self, shape: StepShape, forwarded: Forwarded) -> PlainDraws:
        draws = None
        if self._shaped_graphs is not None:
            draws = self._shaped_graphs.replay(shape)
        return self.draw_alone(forwarded) if draws is None else draws

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

    def _write_scores(
        self,
        plan: StepPlan,
        forwarded: Forwarded,
        draws: PlainDraws | None,
        layout: PayloadLayout,
        payload: DevicePayload,
        result: Tensor,
    ) -> None:
        if not layout.scores:
            return
        width, whole = plan.rows.width, None
        if any(not score.is_prompt for score in plan.scores):
            assert draws is not None
            whole = self._shaped.spread(forwarded.logits_RV[: len(width)], draws)
        step = ScoredStep(
            hidden_TM=forwarded.hidden_TM,
            first_token_R=np.cumsum(width) - width,
            slot_R=plan.rows.slot,
            targets=self._inputs.targets_T,
            draws=whole,
            draw_of_row_R=np.arange(len(width)),
        )
        words = result.view(torch.int32)[: RESULT_WORDS * self._config.max_running]
        status_R = words.view(RESULT_WORDS, -1)[2]
        for row, is_too_large in self._scores.write(step, layout, payload):
            is_refused = is_too_large & (status_R[row] == RowStatus.OK)
            status_R[row].masked_fill_(is_refused, int(RowStatus.LARGE_SUPPORT))

    def _pack_snapshot(self, plan: StepPlan, layout: PayloadLayout, payload: Tensor) -> None:
        """Copy the forward's rows into memory of the step, while nobody can write over them."""
        if layout.snapshot:
            slots_T = self._inputs.kv_slots_T[: plan.num_tokens]
            self._copies.snapshot(slots_T, layout.snapshot, payload)
