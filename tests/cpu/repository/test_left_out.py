"""cmake/left_out.txt as CMake and tools/kernels/build_manual.sh read it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RELEASED = "75,80,90,100,120"


def of_cmake(unit: str, sm80: str, folder: Path) -> str:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    text = (ROOT / "cmake" / "Archs.cmake").read_text()
    function = re.search(r"file\(STRINGS cmake/left_out.*?endfunction\(\)", text, re.DOTALL)
    script = folder / "code_of.cmake"
    script.write_text(
        f'set(FLASHSCI_CODE_SM80 "arch=compute_80,code=[compute_80{sm80}]")\n{function[0]}\n'
        f'flashsci_code_of("{unit}" code)\nmessage("${{code}}")\n'
    )
    return subprocess.run(["cmake", "-P", script], cwd=ROOT, capture_output=True, text=True, check=True).stderr.strip()


def of_script(unit: str, sm80: str) -> str:
    text = (ROOT / "tools" / "kernels" / "build_manual.sh").read_text()
    function = re.search(r"^code_of\(\) \{.*?^\}", text, re.DOTALL | re.MULTILINE)
    script = (
        f'declare -A code; code[sm80]="arch=compute_80,code=[compute_80{sm80}]"\n{function[0]}\n'
        f'code_of "{unit.rsplit("/", 1)[0]}"'
    )
    return subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("unit", "asked", "compiled"),
    [
        ("sm80/dropout/fp16.cu", RELEASED, "80,90"),
        ("sm80/dropout/fp16.cu", "80,90", "80,90"),
        ("sm80/dropout/fp16.cu", "89", "89"),
        ("sm80/dropout/fp16.cu", "100,120", "100"),
        ("sm80/weights/fp32.cu", "90,100,120", "90,100,120"),
        ("sm80/paged/bf16.cu", RELEASED, "80,100,120"),
        ("sm80/paged8/bf16.cu", RELEASED, "80,100"),
        ("sm80/paged/bf16.cu", "90", "90"),
    ],
)
def test_what_is_compiled(tmp_path, unit, asked, compiled):
    names = lambda archs: "".join(f",sm_{a}" for a in archs.split(",") if int(a) >= 80)  # noqa: E731
    expected = f"arch=compute_80,code=[compute_80{names(compiled)}]"
    assert of_script(unit, names(asked)) == expected
    assert of_cmake(unit, names(asked), tmp_path) == expected


def test_every_folder_is_there():
    lines = (ROOT / "cmake" / "left_out.txt").read_text().splitlines()
    folders = [line.split()[0] for line in lines if not line.startswith("#")]
    assert folders and all((ROOT / "csrc" / folder).is_dir() for folder in folders)
