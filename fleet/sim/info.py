"""The routes that tell about a replica: health, models, metrics, tokenizer, server_info, adapters.

Of vLLM's long answers (server_info, metrics, openapi) only what others read is there, at the
places where vLLM has it.
"""

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from fleet.sim.errors import BadRequest, NotFound
from fleet.sim.generation import decode, encode
from fleet.sim.http import Routes, answer, body_object, choice, empty, field
from fleet.sim.prompts import chat_text, check_model

if TYPE_CHECKING:
    from fleet.sim.engine import SimEngine


class InfoRoutes:
    """The telling routes of one engine."""

    def __init__(self, engine: "SimEngine") -> None:
        self._engine = engine
        self._options = engine.options
        self._started = time.time()
        self._answered = 0

    def routes(self) -> Routes:
        """Path to method to handler."""
        table: Routes = {
            "/health": {"GET": self.health},
            "/ping": {"GET": self.health, "POST": self.health},
            "/version": {"GET": self.version},
            "/load": {"GET": self.load},
            "/metrics": {"GET": self.metrics},
            "/v1/models": {"GET": self.models},
            "/openapi.json": {"GET": self.openapi},
            "/server_info": {"GET": self.server_info},
            "/tokenize": {"POST": self.tokenize},
            "/detokenize": {"POST": self.detokenize},
        }
        return table | (self._lora_routes() if self._options.lora else {})

    def _lora_routes(self) -> Routes:
        return {
            "/v1/load_lora_adapter": {"POST": self.load_lora},
            "/v1/unload_lora_adapter": {"POST": self.unload_lora},
        }

    async def health(self, _request: web.BaseRequest) -> web.Response:
        """GET /health: an empty 200, or 503 from a dead engine."""
        return web.Response(status=503) if self._engine.dead else empty()

    async def version(self, _request: web.BaseRequest) -> web.Response:
        """GET /version."""
        return answer({"version": self._options.vllm_version})

    async def load(self, _request: web.BaseRequest) -> web.Response:
        """GET /load."""
        return answer({"server_load": len(self._engine.requests)})

    async def models(self, _request: web.BaseRequest) -> web.Response:
        """GET /v1/models: the model, then its adapters."""
        base = self._options.model
        cards = [self._card(base, base, None)]
        cards += [self._card(name, path, base) for name, path in self._engine.loras.items()]
        return answer({"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self._options.max_model_len,
            "permission": [],
        }

    async def metrics(self, _request: web.BaseRequest) -> web.Response:
        """GET /metrics in Prometheus text."""
        requests = self._engine.requests.values()
        running = sum(request.admitted for request in requests)
        label = f'{{engine="0",model_name="{self._options.model}"}}'
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{label} {float(running)}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{label} {float(len(requests) - running)}",
        ]
        if self._options.api_processes == 1:  # several of them tell of no process
            lines += ["# TYPE process_start_time_seconds gauge"]
            lines += [f"process_start_time_seconds {self._started}"]
        return web.Response(
            text="\n".join(lines) + "\n",
            headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"},
        )

    async def openapi(self, _request: web.BaseRequest) -> web.Response:
        """GET /openapi.json: which paths there are."""
        from fleet.sim.control import ControlRoutes

        routes = self.routes() | ControlRoutes(self._engine).routes()
        paths = {
            path: {method.lower(): {"responses": {"200": {}}} for method in methods}
            for path, methods in routes.items()
        }
        info = {"title": "FastAPI", "version": "0.1.0"}
        return answer({"openapi": "3.1.0", "info": info, "paths": paths})

    async def server_info(self, request: web.BaseRequest) -> web.Response:
        """GET /server_info?config_format=."""
        form = choice(request, "config_format", ("text", "json"), "text")
        config = self._config()
        shown = config if form == "json" else f"model='{self._options.model}', …"
        return answer({"vllm_config": shown, "vllm_env": {}, "system_env": {}})

    def _config(self) -> dict[str, Any]:
        return {
            "model_config": {
                "model": self._options.model,
                "served_model_name": self._options.model,
                "max_model_len": self._options.max_model_len,
            },
            "cache_config": {"block_size": self._options.block_size},
            "parallel_config": self._parallel(),
            "weight_transfer_config": {"backend": self._options.backend},
            "instance_id": self._instance(),
        }

    def _instance(self) -> str:
        if self._options.api_processes == 1:
            return self._engine.instance_id
        self._answered += 1
        return f"{self._engine.instance_id}-{self._answered % self._options.api_processes}"

    def _parallel(self) -> dict[str, Any]:
        options, index = self._options, self._engine.index
        workers = options.workers_of(index)
        dp_index = options.data_parallel_index(index)
        dp_size = options.data_parallel_size()
        return {
            "tensor_parallel_size": workers,
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "data_parallel_size": dp_size,
            "data_parallel_size_local": 1,
            # vLLM sets the rank of a dense deployment back to 0; only the index stays.
            "data_parallel_rank": dp_index if options.topology == "moe_dp" else 0,
            "data_parallel_index": dp_index,
            "data_parallel_external_lb": options.topology == "moe_dp",
            "data_parallel_hybrid_lb": False,
            "is_moe_model": options.topology == "moe_dp",
            "enable_expert_parallel": options.topology == "moe_dp",
            "world_size": workers,
            "world_size_across_dp": workers * dp_size,
            "_api_process_count": options.api_processes,
            "rank": 0,
        }

    async def tokenize(self, request: web.BaseRequest) -> web.Response:
        """POST /tokenize a prompt or messages."""
        body = await body_object(request)
        check_model(body.get("model"), self._engine)
        text = chat_text(body["messages"]) if "messages" in body else field(body, "prompt", str)
        tokens = encode(text)
        return answer(
            {
                "count": len(tokens),
                "max_model_len": self._options.max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: web.BaseRequest) -> web.Response:
        """POST /detokenize."""
        return answer({"prompt": decode(field(await body_object(request), "tokens", list))})

    async def load_lora(self, request: web.BaseRequest) -> web.Response:
        """POST /v1/load_lora_adapter."""
        body = await body_object(request)
        name, path = field(body, "lora_name", str), field(body, "lora_path", str)
        async with self._engine.core():
            if name in self._engine.loras and not body.get("load_inplace"):
                raise BadRequest(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    kind="InvalidUserInput",
                )
            self._engine.loras[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora(self, request: web.BaseRequest) -> web.Response:
        """POST /v1/unload_lora_adapter."""
        name = field(await body_object(request), "lora_name", str)
        async with self._engine.core():
            if self._engine.loras.pop(name, None) is None:
                raise NotFound(f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
