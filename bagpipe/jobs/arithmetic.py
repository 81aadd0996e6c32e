"""The arithmetic of a rank: all that decides its bits besides the settings, such as its processor and libraries.

    torch, processor, environment ──arithmetic_of──> {name: value} of a rank ──gather──> all ranks, in the checkpoint
    two ranks, or a checkpoint and the job that resumes it ──first_unlike──> the first difference

Libraries choose kernels by the processor's instruction sets. A fused multiply-add, a wider vector or another blocking
rounds differently.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence

import torch

from bagpipe.client.agreement import Difference, first_difference
from bagpipe.util.machine import processor_vendor, vector_instructions

__all__ = ["arithmetic_of", "first_unlike", "unlike_ranks"]

#: Environment variables that choose the kernels of MKL, oneDNN and OpenBLAS. ATEN_CPU_CAPABILITY is seen in its effect.
_CPU_VARIABLES = (
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "DNNL_CPU_ISA_HINTS",
    "DNNL_DEFAULT_FPMATH_MODE",
    "OPENBLAS_CORETYPE",
)
#: Environment variables that choose the kernels of cuBLAS.
_CUDA_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)


def arithmetic_of(device: str) -> dict[str, str]:
    """The arithmetic of this process by name, the most telling names first.

    Args:
        device: cpu, cuda or cuda:N; torch's threads are set.
    """
    build = {"torch": f"{torch.__version__} ({(torch.version.git_version or 'unknown')[:10]})"}
    return {**(_of_cpu() if device == "cpu" else _of_cuda(device)), **build}


def _of_cpu() -> dict[str, str]:
    built = torch.__config__.show()
    return {
        "device": "cpu",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CPU vendor": processor_vendor(),
        "CPU instructions": vector_instructions(),
        "threads": str(torch.get_num_threads()),
        "BLAS": _found(r"Math Kernel Library Version \S+", built) or _found(r"(?<=BLAS_INFO=)\w+", built) or "none",
        "oneDNN": _found(r"(?<=MKL-DNN )v\S+", built) or "none",
        **_variables(_CPU_VARIABLES),
    }


def _of_cuda(device: str) -> dict[str, str]:
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}",
        "CUDA": torch.version.cuda or "none",
        "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "cuBLAS": _version_of("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
        "Triton": _version_of("triton"),
        **_variables(_CUDA_VARIABLES),
    }


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[0] if match is not None else ""


def _version_of(*packages: str) -> str:
    """Version of the first installed package; "none" if none is."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "none"


def _variables(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ.get(name, "not set") for name in names}


def first_unlike(one: Mapping[str, str], other: Mapping[str, str]) -> Difference | None:
    """The first difference between two records; None if there is none. Compares only what both record."""
    common = [name for name in one if name in other]
    return first_difference({name: one[name] for name in common}, {name: other[name] for name in common})


def unlike_ranks(records: Sequence[Mapping[str, str]]) -> str:
    """One line that names the ranks unlike rank 0 and the first difference; empty if all are alike."""
    found = {rank: first_unlike(records[0], record) for rank, record in enumerate(records)}
    unlike = {rank: difference for rank, difference in found.items() if difference is not None}
    if not unlike:
        return ""
    rank, difference = next(iter(unlike.items()))
    return (
        f"not all ranks compute like rank 0 (unlike: {', '.join(map(str, unlike))}): {difference.path} is "
        f"{difference.first} on rank 0 and {difference.second} on rank {rank}. Copies of the dense part may come to "
        "differ in the last bits, which ends the job with an error at its next checkpoint or its end"
    )
