"""Build the C++ kernels for this machine: python -m nanopaged.kernels.build

From then on attention_backend="auto" takes them on a CPU.
"""

import sys

from nanopaged.kernels import cpp

if __name__ == "__main__":
    try:
        cpp.load()
    except ValueError as error:
        sys.exit(str(error))
    print(f"the C++ kernels are ready: {cpp.library_path()}")
