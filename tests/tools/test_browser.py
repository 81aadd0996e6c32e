"""Where a browser comes from: PATH first, then the environment's own; without npm nothing fails."""

from __future__ import annotations

from tools import browser


def test_the_machines_browser_is_preferred(tmp_path, monkeypatch):
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser.find_browser() == program
    assert "FONTCONFIG_FILE" not in browser.environment_of(program)


def test_the_environments_own_browser_finds_its_libraries(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(browser, "FOLDER", tmp_path)
    (tmp_path / "chromium").touch()
    found = browser.find_browser()
    assert found == tmp_path / "chromium"
    assert browser.environment_of(found)["LD_LIBRARY_PATH"] == str(tmp_path / "lib")


def test_without_npm_it_says_so_and_all_is_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(browser, "FOLDER", tmp_path / "browser")
    assert browser.main() == 0
    assert "its test is skipped" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
