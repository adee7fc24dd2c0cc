"""What a server says of itself: health, models, settings, metrics.

Owns SGLang's names for the settings, on which rollout frameworks compare servers.
"""

import time
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from dovetail.core.client import EngineClient
from dovetail.server.errors import HttpError
from dovetail.server.metrics import Metrics
from dovetail.server.openai.models import models_reply
from dovetail.server.settings import ServerSettings
from dovetail.server.traffic import Traffic

WEIGHT_VERSION = "0"  # weights do not change yet


class InfoRoutes:
    """The routes that read and change nothing."""

    def __init__(
        self,
        client: EngineClient,
        traffic: Traffic,
        metrics: Metrics,
        settings: ServerSettings,
    ) -> None:
        self._client = client
        self._traffic = traffic
        self._metrics = metrics
        self._settings = settings
        self._created = int(time.time())

    async def health(self, http: HttpRequest) -> Response:
        """Say whether the engine's loop turns; needs no generation.

        Raises:
            HttpError: it does not, or the server is ending (503).
        """
        health = self._client.health()
        if self._traffic.is_draining:
            raise HttpError(503, "the server is ending", code="draining")
        if health.state != "alive":
            raise HttpError(
                503, f"the engine is {health.state}: {health.reason}", code=health.state
            )
        return _json({"status": "ok"})

    async def models(self, http: HttpRequest) -> Response:
        """List the one model."""
        return _json(
            models_reply(
                self._settings.model_name,
                context_len=self._client.config.context_len,
                created=self._created,
            )
        )

    async def metrics(self, http: HttpRequest) -> Response:
        """Return the numbers for Prometheus."""
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def model_info(self, http: HttpRequest) -> Response:
        """Say which model this is."""
        return _json(
            {
                "model_path": self._client.config.model_folder,
                "tokenizer_path": self._client.config.model_folder,
                "served_model_name": self._settings.model_name,
                "is_generation": True,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "weight_version": WEIGHT_VERSION,
                "max_model_len": self._client.config.context_len,
            }
        )

    async def server_info(self, http: HttpRequest) -> Response:
        """Return all settings: under SGLang's names, and ours with the reason of each."""
        config, stats = self._client.config, self._client.stats()
        num_used = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
        return _json(
            {
                "model_path": config.model_folder,
                "tokenizer_path": config.model_folder,
                "served_model_name": self._settings.model_name,
                "version": self._settings.version,
                "dtype": config.dtype,
                "device": config.device,
                "context_length": config.context_len,
                "page_size": config.page_size,
                "max_running_requests": config.max_running,
                "max_total_num_tokens": config.num_pages * config.page_size,
                "chunked_prefill_size": config.chunk_size,
                "schedule_policy": config.policy,
                "disable_radix_cache": not config.prefix_cache,
                "disable_overlap_schedule": config.depth == 0,
                "enable_metrics": True,
                "weight_version": WEIGHT_VERSION,
                "enable_return_routed_experts": "experts" in config.capture,
                **_FIXED,
                "internal_states": [
                    {
                        "num_running_reqs": stats.num_running,
                        "num_waiting_reqs": stats.num_waiting,
                        "num_used_tokens": num_used * config.page_size,
                        "weight_version": WEIGHT_VERSION,
                    }
                ],
                "engine_config": config,
            }
        )


_FIXED: dict[str, Any] = {
    "tp_size": 1,
    "pp_size": 1,
    "ep_size": 1,
    "dp_size": 1,
    "moe_dp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "disaggregation_mode": "null",
    "disaggregation_bootstrap_port": None,
    "encoder_only": False,
    "enable_memory_saver": False,
}
"""What other settings of SGLang amount to here."""


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
