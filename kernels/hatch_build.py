"""The wheel's build hook: compile the CUDA library and put it into the package."""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cuda_build


class CudaBuildHook(BuildHookInterface[Any]):
    """One wheel serves every Python and torch version: ctypes loads a plain C library."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tag the wheel by platform alone."""
        output = Path(self.root) / cuda_build.LIBRARY
        try:
            cuda_build.build(output, Path(self.root) / "build", os.environ)
        except cuda_build.BuildError as error:
            sys.exit(f"error: {error}")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(str(cuda_build.LIBRARY))
