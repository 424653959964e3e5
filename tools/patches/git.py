"""git, blind to the repositories around it and to the user's configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tools.patches.pin import PatchError

# Everything that could make an exported patch depend on the machine is pinned here. The identity is the
# committer's, of throw-away commits; an author always comes from the patch, or from whoever edits.
GIT_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "LC_ALL": "C",
    "TZ": "UTC",
    "GIT_COMMITTER_NAME": "pyspac",
    "GIT_COMMITTER_EMAIL": "pyspac@localhost",
}
GIT_ENV_BASE = {
    "GIT_AUTHOR_NAME": "pyspac",
    "GIT_AUTHOR_EMAIL": "pyspac@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00+0000",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00+0000",
}
GIT_OPTIONS = (
    "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.fileMode=true", "-c", "gc.auto=0",
    "-c", "commit.gpgSign=false", "-c", "diff.renames=true", "-c", "diff.algorithm=myers",
    "-c", "core.quotePath=true",
)  # fmt: skip


def run_git(
    repo: Path, *args: str, env: dict[str, str] | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in `repo`, blind to every repository around it and to the user's configuration.

    Inside another repository `git apply` would change nothing, and report success.
    """
    ceiling = {"GIT_CEILING_DIRECTORIES": str(repo.resolve().parent)}
    full = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | GIT_ENV | ceiling | (env or {})
    return subprocess.run(
        ["git", *GIT_OPTIONS, *args], cwd=repo, env=full, input=stdin, capture_output=True, text=True
    )


def git(repo: Path, *args: str, env: dict[str, str] | None = None, stdin: str | None = None) -> str:
    """What `run_git` prints. Raises PatchError with it where git fails."""
    done = run_git(repo, *args, env=env, stdin=stdin)
    if done.returncode != 0:
        raise PatchError(f"git {' '.join(args)} failed in {repo}:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout
