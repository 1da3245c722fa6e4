"""The search of machine code for reads of unwritten registers."""

from __future__ import annotations

import pytest
from machine_code import unwritten_reads_of


def listing(*instructions):
    """Return instructions in nvdisasm's format; a line that ends with a colon is a label."""
    lines = (
        x if x.endswith(":") else f"        /*{16 * i:04x}*/                   {x} ;"
        for i, x in enumerate(instructions)
    )
    return "\n".join(lines)


def test_a_read_of_an_unwritten_register_is_found():
    text = listing("S2R R4, SR_TID.X", "IADD3 R175, P3, R175, 0x2, RZ", "IMAD.IADD R5, R175, 0x1, R4", "EXIT")
    assert unwritten_reads_of(text) == ["0010 IADD3 R175, P3, R175, 0x2, RZ"]


@pytest.mark.parametrize(
    "move",
    ["PRMT R9, R9, 0x7632, R1", "PRMT R9, R1, 0x5410, R9", "PRMT R8, R9, 0x7610, R1", "PRMT R9, R9, R1, R1"],
)
def test_a_move_of_bytes_of_an_unwritten_register_is_found(move):
    assert unwritten_reads_of(listing(move, "EXIT")) == [f"0000 {move}"]


@pytest.mark.parametrize(
    "instructions",
    [
        ("LDC.64 R6, c[0x0][0x210]", "IADD3 R8, R6, R7, RZ"),
        ("LDG.E.128 R4, desc[UR4][R2.64]", "STG.E [R2.64], R7"),
        ("IMAD.WIDE R4, R2, R3, R6", "IADD3 R8, R4, R5, RZ"),
        ("HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR8].tnspB, RZ, !UPT", "FADD R50, R24, R39"),
        ("HGMMA.64x8x16.F32 RZ, gdesc[URZ], RZ, !UPT, gsb0", "MOV R9, R1"),
        ("@P0 MOV R9, R1", "IADD3 R9, R9, 0x1, RZ"),
        ("PRMT R9, R1, 0x7632, R9",),
        ("PRMT R9, R9, 0x7610, R1",),
        ("PRMT R9, R9.reuse, 0x5410, R1",),
    ],
)  # fmt: skip
def test_results_of_every_kind_of_instruction_count_as_written(instructions):
    given = (
        "CS2R R2, SRZ",
        "CS2R R40, SRZ",
        "CS2R R42, SRZ",
        "MOV R6, RZ",
        "UMOV UR4, URZ",
        "UMOV UR10, URZ",
        "UMOV UR11, URZ",
    )
    assert not unwritten_reads_of(listing(*given, *instructions, "EXIT"))


def test_every_path_counts():
    """A register that one of two paths writes is written where they meet; one written after a loop is not inside it."""
    loop = listing(
        "MOV R2, RZ",
        ".L_x_0:",
        "IADD3 R2, R2, R3, RZ",
        "ISETP.GT.AND P0, PT, R2, 0x9, PT",
        "@!P0 BRA `(.L_x_0)",
        "MOV R3, RZ",
        "EXIT",
    )
    assert unwritten_reads_of(loop) == ["0020 IADD3 R2, R2, R3, RZ"]
    jump = listing("@P0 BRA `(.L_x_0)", "MOV R3, RZ", ".L_x_0:", "MOV R2, R3", "EXIT")
    assert not unwritten_reads_of(jump)


def test_a_wgmma_reads_its_accumulator_its_register_operand_and_its_descriptor():
    wgmma = "HGMMA.64x8x16.F32.BF16 R24, R40, gdesc[UR8].tnspB, R24, gsb0"
    given = ["UMOV UR10, URZ", "UMOV UR11, URZ", "CS2R R24, SRZ", "CS2R R26, SRZ", "CS2R R40, SRZ", "CS2R R42, SRZ"]
    assert not unwritten_reads_of(listing(*given, wgmma, "EXIT"))
    for i in range(len(given)):
        assert len(unwritten_reads_of(listing(*given[:i], *given[i + 1 :], wgmma, "EXIT"))) == 1
