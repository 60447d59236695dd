"""The worker's side of publishing from a CPU: weights are read from a file that the trainer's process has written.

vLLM imports this in its workers; :mod:`oppo.vllm.publish` is the other side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The weights of one update.

    Attributes:
        path: a safetensors file, with tensors by the names of transformers.
    """

    path: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads weights from a file, layer by layer: kernels on a CPU keep packed copies, which are made anew.

    The file is read whole before anything is changed, so a file that cannot be read leaves the old weights served.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing: the file has not been read."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load the weights of a file, and wait until a GPU has them; on a CPU the base class would fail at that."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the weights of a file."""
        weights = load_file(update_info.path)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):  # a tied one is not in the file, and keeps a packed copy on a CPU
                layer.quant_method.process_weights_after_loading(layer)

    def finish_weight_update(self) -> None:
        """Do nothing: the weights are in use."""

    def shutdown(self) -> None:
        """Do nothing."""
