"""Methods of vLLM's workers that take the weights of the trainer; a worker extension, called by `collective_rpc`.

vLLM's workers import this file, so it imports nothing of this package. The weights come in chunks, in the format of a
checkpoint: handles of GPU memory, by the unique id of the GPU, or a file. Between `start_push` and `finish_push` vLLM
loads them layer by layer into the tensors that its CUDA graphs read (its layerwise reload, which its own weight
transfer engines use; that for CUDA IPC needs Ray up to vLLM 0.28).
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch


class WeightReceiver:
    """Mixed into vLLM's worker class, whose `model_runner` and `device` it uses."""

    model_runner: Any
    device: Any

    def start_push(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.get_model())

    def receive_push(self, names: list[str], handles: str | None, path: str | None) -> None:
        """Load one chunk: tensors named `names`, from pickled handles of each by GPU, or from a safetensors file."""
        if path is not None:
            from safetensors.torch import load_file

            weights = list(load_file(path).items())
        else:
            assert handles is not None
            weights = list(zip(names, self._open_handles(handles), strict=True))
        self.model_runner.get_model().load_weights(weights)
        # the trainer frees its copies as soon as this returns
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def finish_push(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.get_model(), self.model_runner.model_config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.ipc_collect()

    def _open_handles(self, handles: str) -> list[torch.Tensor]:
        """The trainer's tensors on this worker's GPU."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        tensors = []
        for by_gpu in pickle.loads(base64.b64decode(handles)):
            arguments = list(by_gpu[gpu])
            arguments[6] = self.device.index  # the storage's device, whose index differs between processes
            tensors.append(rebuild_cuda_tensor(*arguments))
        return tensors
