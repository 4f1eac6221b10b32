# Sourced by the other scripts: a project-local virtual environment, installed once.
#
# MPRUN_PYTHON=/path/to/python uses that interpreter unchanged and installs nothing (for a machine
# without a network, or with another build of torch). MPRUN_VENV is another folder than .venv,
# MPRUN_CONSTRAINTS another file than constraints.txt.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
# Hundreds of processes import the same files: compile them once, for any setting of the shell.
unset PYTHONDONTWRITEBYTECODE
venv="${MPRUN_VENV:-$root/.venv}"
constraints="${MPRUN_CONSTRAINTS:-constraints.txt}"

# The dependency groups of pyproject.toml: older versions of pip cannot install groups.
testers=(pytest pytest-xdist hypothesis expecttest pandas soundfile tokenizers sentencepiece hatchling hatch-fancy-pypi-readme)
checkers=(ruff mypy import-linter types-PyYAML "${testers[@]}")

ensure_environment() {  # arguments: further packages
    if [ -n "${MPRUN_PYTHON:-}" ]; then
        python="$MPRUN_PYTHON"
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    python="$venv/bin/python"
    local wanted stamp pip=("$python" -m pip install --quiet --quiet --disable-pip-version-check)
    wanted="$(cat pyproject.toml "$constraints" | sha256sum | cut -d' ' -f1) $*"
    stamp="$venv/.installed-$(echo "$*" | tr -c 'a-z0-9\n' -)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "installing into ${venv#"$root"/} (once; torch is a large download)" >&2
    if [ ! -x "$python" ]; then
        if ! "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "mprun needs Python 3.11 or later; set PYTHON=/path/to/python3" >&2
            exit 2
        fi
        "${PYTHON:-python3}" -m venv "$venv"
    fi
    install_with_uv "$@" || "${pip[@]}" -c "$constraints" -e ".[cli]" "$@"
    if [[ " $* " == *" pytest "* ]]; then
        # FP8 is compared with torchao where it can be installed.
        "${pip[@]}" -c "$constraints" torchao || echo "no torchao: its tests are skipped" >&2
    fi
    echo "$wanted" > "$stamp"
}

# uv unpacks torch in a third of pip's time. Not if pip is set to another index: uv would
# not know.
install_with_uv() {
    [ -z "${PIP_INDEX_URL:-}" ] && ! "$python" -m pip config get global.index-url > /dev/null 2>&1 &&
        "${pip[@]}" uv && "$python" -m uv pip install --quiet --python "$python" -c "$constraints" -e ".[cli]" "$@"
}
