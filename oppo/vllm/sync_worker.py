"""The worker's side of weight sync: weights are read from a file, or from memory of a GPU that the trainer has too.

vLLM imports this in its workers; :mod:`oppo.vllm.sync` is the other side.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from oppo.vllm.sync import fingerprints, restored


class Unpacked(UnquantizedEmbeddingMethod):
    """Weights of an embedding as they are; should it ever multiply, then with these, and not with a packed copy."""

    def process_weights_after_loading(self, layer: VocabParallelEmbedding) -> None:
        layer.cpu_linear = torch.nn.functional.linear


@dataclass
class FileInit(WeightTransferInitInfo):
    """What the workers check when the transfer is initialised; an empty field is not checked."""

    path: str = ""  # a file or directory that the worker must be able to read
    model: dict[str, Any] = field(
        default_factory=dict
    )  # config fields of the trained model; the served one's must be equal
    adapter: str = ""  # the file of the adapter that vLLM must serve
    prints: dict[str, str] = field(default_factory=dict)  # fingerprints of the adapter's tensors, made by the trainer


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A safetensors file of one update, with the fingerprints that the trainer sent."""

    path: str
    prints: dict[str, str]


def layers_of(model: torch.nn.Module) -> frozenset[str]:
    return frozenset(name.rpartition(".")[0] for name, _ in model.named_parameters())


def check_taken(model: torch.nn.Module, layers: frozenset[str]) -> None:
    # Before a reload is finished: each of some layers took weights.
    # A model's loader passes over names that it does not know, or writes past the reload, and vLLM then goes on with
    # the layer's old weights. A layer that took a part of its weights is not noticed.
    infos = {name: get_layerwise_info(layer) for name, layer in model.named_modules() if name in layers}
    if stale := [name for name, info in infos.items() if info.can_load() and not info.load_numel]:
        raise ValueError(f"{type(model).__name__} took no weights for {len(stale)} layers, {stale[0]} the first")


def check_delivered(weights: Mapping[str, torch.Tensor], sent: Mapping[str, str]) -> None:
    got = fingerprints(weights)
    if other := [name for name in {**sent, **got} if sent.get(name) != got.get(name)]:
        raise ValueError(
            f"{len(other)} of {len(sent)} tensors are not those that the trainer sent: {other[0]} is "
            f"{got.get(other[0], 'not there')}, and was {sent.get(other[0], 'not sent')}"
        )


def check_adapter(model: torch.nn.Module, sent: Mapping[str, torch.Tensor]) -> None:
    # vLLM joins the matrices of joined layers, so they are compared as they are, without their names, in its dtype.
    manager: Any = model.lora_manager
    dtype = manager.lora_config.lora_dtype
    active = [manager.get_adapter(each) for each in manager.lora_index_to_id if each is not None]
    wanted = Counter(fingerprints({name: tensor.to(dtype) for name, tensor in sent.items()}).values())
    held = [Counter(fingerprints(dict(enumerate_matrices(adapter))).values()) for adapter in active if adapter]
    if wanted not in held:
        missing = max(((wanted - each).total() for each in held), default=wanted.total())
        raise ValueError(
            f"of {wanted.total()} matrices of the adapter that the trainer sent, vLLM does not serve {missing}"
        )


def enumerate_matrices(adapter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, layer in adapter.loras.items():
        for kind in ("lora_a", "lora_b"):
            found = getattr(layer, kind)
            for number, each in enumerate(found if isinstance(found, list | tuple) else [found]):
                if each is not None:
                    yield f"{name} {kind} {number}", each


class CheckedTransfer(WeightTransferEngine[Any, Any]):
    def start_weight_update(self) -> None:
        self._layers = layers_of(self.model)
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        check_taken(self.model, self._layers)
        super().finish_weight_update()


class HandleTransfer(CheckedTransfer, IPCWeightTransferEngine):
    """vLLM's transfer within a GPU, of handles that came without pickles."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        return super().parse_update_info({**update_dict, "ipc_handles": restored(update_dict["ipc_handles"])})


class BroadcastTransfer(CheckedTransfer, NCCLWeightTransferEngine):
    """vLLM's transfer between GPUs."""


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads weights from a file, layer by layer: kernels on a CPU keep packed copies, which are made anew.

    The file is read whole before anything is changed, so a file that cannot be read leaves the old weights served.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        if init_info.adapter:
            weights = load_file(init_info.adapter)
            check_delivered(weights, init_info.prints)
            check_adapter(self.model, weights)
            return
        config = self.model_config.hf_text_config
        served = {name: getattr(config, name, None) for name in init_info.model}
        if other := [
            f"{name} {value}, not {served[name]}" for name, value in init_info.model.items() if value != served[name]
        ]:
            raise ValueError(f"the model that is trained has {', '.join(other)} as the one that is served")
        if init_info.path:
            try:
                os.close(os.open(init_info.path, os.O_RDONLY))  # a file, or a directory of adapters
            except OSError as error:
                raise ValueError(
                    f"this worker cannot read the trainer's file ({error}): name a directory that both machines, or "
                    "containers, have by vllm.weights_directory (in a program: weights_directory=)"
                ) from error
        tables, heads = self._tables()
        for table in tables if heads and self.device.type == "cpu" else []:
            if type(table.quant_method) is UnquantizedEmbeddingMethod:
                table.quant_method = Unpacked()

    def start_weight_update(self) -> None:
        """Do nothing: the file has not been read."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # where the base class would fail
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        weights, layers = load_file(update_info.path), layers_of(self.model)
        check_delivered(weights, update_info.prints)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights.items()))
        check_taken(self.model, layers)
        finalize_layerwise_reload(self.model, self.model_config)
        for head in self._tied_heads():
            head.quant_method.process_weights_after_loading(head)
        for layer in self.model.modules() if self.device.type == "cpu" else ():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:  # vLLM packs experts once: after a reload the packed copy is stale
                kernel.fused_experts.process_weights_after_loading(layer)

    def _tied_heads(self) -> list[ParallelLMHead]:
        # Tied heads are not in the file, since they are embeddings; a CPU's keep a packed copy.
        tables, heads = self._tables()
        embedded = {table.weight.data_ptr() for table in tables}
        return [head for head in heads if head.weight.data_ptr() in embedded]

    def _tables(self) -> tuple[list[VocabParallelEmbedding], list[ParallelLMHead]]:
        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
        return [layer for layer in layers if layer not in heads], heads

    def finish_weight_update(self) -> None:
        """Do nothing: the weights are in use."""

    def shutdown(self) -> None:
        """Do nothing."""
