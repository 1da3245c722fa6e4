import os

import pytest

from tokenmix_core._utils.atomic_io import write_atomically


def test_a_failing_writer_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def fail(p):
        p.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_is_as_readable_as_any(tmp_path):
    (tmp_path / "plain").write_text("")
    for content in ("text", lambda p: p.write_text("text")):
        write_atomically(tmp_path / "new" / "file", content)
        assert (tmp_path / "new" / "file").read_text() == "text"
        assert os.stat(tmp_path / "new" / "file").st_mode == os.stat(tmp_path / "plain").st_mode


def test_writing_leaves_the_umask_of_the_process_alone(tmp_path, monkeypatch):
    # other threads may create files at any time
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail(f"the umask was set to {mask:o}"))
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
