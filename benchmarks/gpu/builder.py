"""Phase `build`: what the benchmark needs and no more, for the GPU that is present. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from settings import REPOSITORY, Settings

TARGETS = ("spac", "_ffi", "engine-tests")
CUDA_FOLDERS = ("/usr/local/cuda", "/opt/cuda")
DRIVER_FOLDERS = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
)
REPORT_EVERY_S = 15.0


class BuildError(Exception):
    """What failed, and what to do."""


# ---- what is there -------------------------------------------------------------------------------


def has_gpu() -> bool:
    """A device that the NVIDIA driver lists."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return listed.returncode == 0 and listed.stdout.startswith("GPU")


def find_nvcc() -> Path | None:
    folders = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT")]
    folders += [*CUDA_FOLDERS, *map(str, sorted(Path("/usr/local").glob("cuda-*"), reverse=True))]
    found = shutil.which("nvcc") or next(
        (f"{folder}/bin/nvcc" for folder in folders if folder and Path(folder, "bin/nvcc").is_file()), None
    )
    return Path(found).resolve() if found else None


def toolkit_of(nvcc: Path) -> Path:
    """CUDA's folder; nvcc itself knows it where the program on PATH is a script."""
    listed = subprocess.run(
        [str(nvcc), "-x", "cu", "--dryrun", "-E", os.devnull], capture_output=True, text=True
    )
    found = re.search(r"TOP=(\S+)", listed.stdout + listed.stderr)
    return Path(found[1]).resolve() if found else nvcc.parent.parent


def package_folders() -> Iterator[Path]:
    """Where Python packages may have brought CUDA's libraries."""
    folders = [Path(path) for path in sys.path if path.endswith("-packages")]
    python = shutil.which("python3")
    if python:
        folders += sorted(Path(python).parent.parent.glob("lib/python3*/site-packages"))
    for folder in dict.fromkeys(folders):
        yield from sorted(folder.glob("nvidia/cu1[0-9]"), reverse=True)
        yield from sorted(folder.glob("nvidia/cublas"))


def cublas_options(nvcc: Path, shelf: Path) -> list[str]:
    """Options of cmake that name a Python package's cuBLAS, if the toolkit has none; links go to `shelf`."""
    toolkit = toolkit_of(nvcc)
    if list(toolkit.glob("include/cublas_v2.h")) + list(toolkit.glob("targets/*/include/cublas_v2.h")):
        return []
    for package in package_folders():
        header, libraries = package / "include" / "cublas_v2.h", sorted(package.glob("lib/libcublas*.so.*"))
        if header.is_file() and libraries:
            return link_cublas(header.parent, libraries, shelf)
    raise BuildError(
        f"no cuBLAS: neither in {toolkit} nor in a Python package. "
        "Install CUDA's libcublas-dev, or the package nvidia-cublas"
    )


def link_cublas(include: Path, libraries: list[Path], shelf: Path) -> list[str]:
    """Names without versions, which a linker wants."""
    shelf.mkdir(parents=True, exist_ok=True)
    options = [f"-DCMAKE_CUDA_FLAGS=-I{include}", f"-DCMAKE_CXX_FLAGS=-I{include}"]
    # programs link to ggml, which needs cuBLAS by the name that it has in the package
    options.append(f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,{libraries[0].parent}")
    for library in libraries:
        name = library.name.split(".so")[0]
        link = shelf / f"{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
        options.append(f"-DCUDA_{name.removeprefix('lib')}_LIBRARY={link}")
    return options


def library_folders(cmake_dir: Path) -> list[str]:
    """For LD_LIBRARY_PATH: where cuBLAS is, if a Python package brought it."""
    return sorted({str(link.resolve().parent) for link in (cmake_dir / "cuda-links").glob("*.so")})


def driver_options(nvcc: Path) -> list[str]:
    """libcuda.so for the linker: the toolkit's stub, else the driver's own, else a build without it."""
    toolkit = toolkit_of(nvcc)
    if list(toolkit.glob("lib*/stubs/libcuda.so")) + list(toolkit.glob("targets/*/lib/stubs/libcuda.so")):
        return []
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    found = re.search(r"libcuda\.so\.1 .*=> (\S+)", listed)
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *DRIVER_FOLDERS]
    named = next(
        (f"{folder}/libcuda.so.1" for folder in folders if Path(folder, "libcuda.so.1").is_file()), None
    )
    library = found[1] if found else named
    return [f"-DCUDA_cuda_driver_LIBRARY={library}"] if library else ["-DGGML_CUDA_NO_VMM=ON"]


# ---- cmake ---------------------------------------------------------------------------------------


def configure_options(s: Settings, cuda: bool) -> list[str]:
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DPYSPAC_BUILD_TOOLS=OFF",
        "-DPYSPAC_BUILD_TESTS=ON",
        f"-DPython3_EXECUTABLE={sys.executable}",
        f"-DPYSPAC_BUILD_BINDING={'ON' if has_python_headers() else 'OFF'}",
    ]
    if not cuda:
        return [*options, "-DGGML_CUDA=OFF"]
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            f"no nvcc on PATH or in {', '.join(CUDA_FOLDERS)}: install the CUDA toolkit, or use --device cpu"
        )
    return [
        *options,
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        "-DCMAKE_CUDA_ARCHITECTURES=" + ("native" if has_gpu() else "86;90"),
        "-DGGML_CUDA_FA_ALL_QUANTS=OFF",
        "-DGGML_CUDA_NCCL=OFF",
        f"-DGGML_CUDA_FA={'ON' if s.flash_attention else 'OFF'}",
        *cublas_options(nvcc, s.cmake_dir / "cuda-links"),
        *driver_options(nvcc),
    ]


def has_python_headers() -> bool:
    return Path(sysconfig.get_paths()["include"], "Python.h").is_file()


def run(s: Settings, left_s: float, say: Callable[[str], None]) -> str:
    """Configure and build; BuildError if that failed or if the time is over, when a second call goes on."""
    cuda = s.device != "cpu" and has_gpu()
    if s.device not in ("cpu", "auto") and s.rpc is None and not cuda:
        raise BuildError(
            f"--device {s.device}, but nvidia-smi lists no GPU; use --device cpu for a rehearsal"
        )
    end = time.monotonic() + left_s
    s.cmake_dir.mkdir(parents=True, exist_ok=True)
    log = s.cmake_dir / "build.log"
    configure(s, cuda, log)
    jobs = str(s.jobs or os.cpu_count() or 1)
    targets = [name for name in TARGETS if name != "_ffi" or has_python_headers()]
    build_with_limit(["cmake", "--build", str(s.cmake_dir), "-j", jobs, "--target", *targets], log, end, say)
    if not has_python_headers():
        compile_binding(s.cmake_dir)
    attention = "with" if s.flash_attention else "without"
    return f"{'CUDA' if cuda else 'CPU'}, {attention} flash attention, in {s.cmake_dir}"


def configure(s: Settings, cuda: bool, log: Path) -> None:
    """Run cmake, unless it has been run with the same options."""
    options = configure_options(s, cuda)
    stamp = s.cmake_dir / ".options"
    if stamp.is_file() and stamp.read_text() == "\n".join(options):
        return
    generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(s.cmake_dir), "-G", generator, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log.write_text(done.stdout)
    if done.returncode != 0:
        raise BuildError(f"cmake failed, see {log}:\n{last_lines(done.stdout)}")
    stamp.write_text("\n".join(options))


def build_with_limit(command: list[str], log: Path, end: float, say: Callable[[str], None]) -> None:
    """Run until `end`; what is compiled stays. ninja's and make's own progress is passed on now and then."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, process_group=0)
        try:
            watch(process, log, end, say)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode != 0:
        raise BuildError(f"the build failed, see {log}:\n{last_lines(log.read_text(errors='replace'))}")


def watch(process: subprocess.Popen[bytes], log: Path, end: float, say: Callable[[str], None]) -> None:
    """Return when the process is done; BuildError if the time is over before."""
    said = time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if now > end:
            raise BuildError(
                f"the time is over at {progress_of(log)}; the same command again goes on from there"
            )
        if now - said > REPORT_EVERY_S:
            said = now
            say(f"build: {progress_of(log)}")


def progress_of(log: Path) -> str:
    found = re.findall(r"^\[ *(\d+/\d+|\d+%)\]", log.read_text(errors="replace"), re.MULTILINE)
    return found[-1] if found else "the start"


def last_lines(text: str, n: int = 25) -> str:
    return "\n".join(text.strip().splitlines()[-n:])


# ---- the Python module, where Python has no headers ------------------------------------------------


def compile_binding(cmake_dir: Path) -> None:
    """The module keeps to Python's limited interface: headers of another 3.x, carried along, will do."""
    include = Path(os.environ.get("PYSPAC_GPU_BUNDLE", ""), "python-include")
    if not (include / "Python.h").is_file():
        raise BuildError(
            "Python has no header files (Debian, Ubuntu: python3-dev), and none were carried along"
        )
    source, bin_dir = cmake_dir / "_ffi.c", cmake_dir / "bin"
    header = REPOSITORY / "engine" / "include"
    native = REPOSITORY / "pyspac" / "_native"
    make_c = [sys.executable, str(native / "build_ffi.py"), str(header / "spac.h"), str(source)]
    link = [
        "cc",
        "-O2",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        f"-I{include}",
        f"-I{header}",
        str(source),
        f"-L{bin_dir}",
        "-lspac",
        "-Wl,-rpath,$ORIGIN",
        "-Wl,--allow-shlib-undefined",
        "-o",
        str(bin_dir / "_ffi.abi3.so"),
    ]
    for command in (make_c, link):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"{command[0]} failed:\n{last_lines(done.stdout + done.stderr)}")
