"""The build of NIXL for this torch: both must use the same CUDA. `make` runs this file to choose the extra."""


def nixl_extra(cuda: str | None) -> str:
    """Diptych's extra with the NIXL for torch's CUDA ("13.0"). None: torch without CUDA, where any build works."""
    return "nixl-cu13" if cuda is not None and int(cuda.partition(".")[0]) >= 13 else "nixl"


def mismatch(module: str, cuda: str | None) -> str:
    """How to fix a NIXL module built for another CUDA than torch; empty if it matches."""
    built_for = module.partition("_cu")[2]
    if cuda is None or not built_for or int(cuda.partition(".")[0]) == int(built_for):
        return ""
    return (
        f"{module} is built for CUDA {built_for} and torch for CUDA {cuda}: pip install 'diptych[{nixl_extra(cuda)}]'"
    )


if __name__ == "__main__":
    from torch.version import cuda as torch_cuda

    print(nixl_extra(torch_cuda))
