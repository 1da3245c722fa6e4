"""Search a kernel's machine code for reads of unwritten registers, which may give correct results by chance.

ptxas 12.8, part of Triton 3.6 and 3.7, omits the first instructions that compute some descriptors of smem tiles; the
kernel uses the old content of a register, which may be right by chance. The search misses the fault if an earlier
instruction has written another value to that register.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?(U?P\w+)\s+)?(\S+)(.*?)\s*;")
_LABEL = re.compile(r"\.L_x_\d+")
_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_PREDICATES = r"\s*(?:U?P\w+,\s*)*"
_NO_RESULT = ("ST", "RED.", "BAR", "ISETP", "FSETP", "LDGSTS", "MEMBAR", "HGMMA", "R2P", "EXIT", "BRA")
# harmless reads of an unwritten register: an AND that clears some of its bits before others are set, and a spill
_HARMLESS = r"(LOP3.LUT {r}, {r}, 0x[0-9a-f]+, RZ, 0xc0|STL(\.64)? \[[^]]*\], {r}$)"
_BYTES = re.compile(r"\s*(\w+), (\w+), 0x([0-9a-f]+), (\w+)$")


def disassembler() -> Path:
    """Return the path of Triton's disassembler, which some installations lack."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def compiled_kernels(package: str) -> Iterator[tuple[str, Any]]:
    """Yield names and compiled forms of all kernels of a package that this process has launched."""
    from triton import JITFunction

    from tokenmix_core.kernels.launch.compat import kernels_of

    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        for kernel in vars(sys.modules[name]).values():
            # the variable holds a kernel, or an object that launches the kernel in its attribute `fn`
            kernel = next((x for x in (kernel, getattr(kernel, "fn", None)) if isinstance(x, JITFunction)), None)
            if kernel is not None and kernel.fn.__module__ == name:
                yield from ((kernel.fn.__name__, x) for x in kernels_of(kernel) if hasattr(x, "asm"))


def unwritten_reads(kernel: Any) -> list[str]:
    """Return the instructions of a compiled CUDA kernel that read a register that none before them can have written."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([disassembler(), "-c", file.name], capture_output=True, text=True, check=True)
    return unwritten_reads_of(done.stdout)


def unwritten_reads_of(text: str) -> list[str]:
    """Return, as "address instruction", those that read a register that no path to them has written.

    `text` is nvdisasm's listing of code for Hopper or an older GPU.
    """
    labels, code = {}, []
    for line in text.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append(found.groups())
    reads, writes = zip(*(_registers(op, rest) for _, _, op, rest in code), strict=True)
    # for each instruction, registers that some path to it has written; R1, the stack pointer, is set at entry
    before: list[set[str] | None] = [{"R1"}, *[None] * (len(code) - 1)]
    waiting = [0]
    while waiting:
        i = waiting.pop()
        after = (before[i] or set()) | writes[i]
        for j in _next(i, code, labels):
            known = before[j]
            if known is None or not after <= known:
                before[j] = after | (known or set())
                waiting.append(j)
    found = []
    for (address, _, op, rest), known, read in zip(code, before, reads, strict=True):
        missing = set() if known is None else read - known
        if any(not (re.search(_HARMLESS.format(r=r), op + rest) or _keeps_bytes(op, rest, r)) for r in missing):
            found.append(f"{address} {op}{rest}")
    return found


def _keeps_bytes(op: str, rest: str, register: str) -> bool:
    """True if an instruction replaces bytes of a register by another's and moves none of the register's own bytes."""
    if op != "PRMT" or (operands := _BYTES.match(rest.replace(".reuse", ""))) is None:
        return False
    result, low, chosen, high = operands.groups()
    # hexadecimal digit k selects byte k of the result from the eight bytes of both sources
    sources = [divmod(int(chosen, 16) >> 4 * k & 7, 4) for k in range(4)]
    kept = all((low, high)[source] != register or byte == k for k, (source, byte) in enumerate(sources))
    return result == register and kept


def _found(pattern: str | re.Pattern, text: str) -> re.Match:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"machine code that is not Hopper's: expected {pattern} in {text!r}")
    return found


def _next(i: int, code: list[tuple], labels: dict[str, int]) -> list[int]:
    """Return the indices of the instructions that may follow instruction i."""
    _, predicate, op, rest = code[i]
    then = [labels[_found(_LABEL, rest)[0]]] if op.startswith("BRA") else []
    conditional = predicate is not None or (op.startswith("BRA") and re.search(r"\bU?P\d", rest))
    goes_on = conditional or not op.startswith(("BRA", "EXIT"))
    return [j for j in (*then, *([i + 1] if goes_on else [])) if j < len(code)]


def _registers(op: str, rest: str) -> tuple[set[str], set[str]]:
    """Return the sets of registers that an instruction reads and writes; of a wide source, only the first register."""
    if op.startswith("HGMMA"):
        return _wgmma_registers(op, rest)
    names = ["".join(x) for x in _REGISTER.findall(rest)]
    result = re.match(_PREDICATES + r"(U?R)(\d+)\b", rest)
    if op.startswith(_NO_RESULT) or result is None:
        return set(names), set()
    wide = ".64" in op or "WIDE" in op or (op.startswith("CS2R") and "32" not in op)
    width = 4 if ".128" in op or op.endswith("88.4") else 2 if wide or op.endswith("88.2") else 1
    return set(names[1:]), {f"{result[1]}{int(result[2]) + k}" for k in range(width)}


def _wgmma_registers(op: str, rest: str) -> tuple[set[str], set[str]]:
    """Return these sets for a WGMMA, which reads its accumulator, a left operand in registers, and tile descriptors."""
    if re.match(r"\s*RZ, gdesc\[URZ\], RZ", rest):
        # an HGMMA without operands only commits a group
        return set(), set()
    columns = int(_found(r"64x(\d+)x", op)[1])
    result, left = _found(r"^\s*R(\d+), (?:R(\d+)|gdesc)", rest).groups()
    uniform = int(_found(r"gdesc\[UR(\d+)", rest)[1])
    sums = {f"R{int(result) + k}" for k in range(columns // 2)}
    reads = {f"UR{uniform + k}" for k in (range(4) if left is None else (2, 3))}
    if left is not None:
        reads |= {f"R{int(left) + k}" for k in range(4)}
    return reads if "RZ, !UPT" in rest else reads | sums, sums
