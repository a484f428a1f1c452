# SPDX-License-Identifier: Apache-2.0
"""Harbor trials in mayfly's machines: one machine a trial, made and removed by the command `mayfly`.

    harbor run … --environment-import-path mayfly_harbor:MayflyEnvironment

with this folder on PYTHONPATH. The machine's image is the keyword argument `image`, else the task's
docker_image, by that name in `mayfly image ls`. MAYFLY names the program (default: mayfly).
"""
import asyncio
import os
import re
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path, PurePosixPath

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

OWN_FAILURE = 125  # the status with which mayfly says that it is not the command that failed
START_SECONDS = 300
BUILTIN = "builtin"  # the image in the program: a shell, and no more


def program():
    return os.environ.get("MAYFLY", "mayfly")


class MayflyError(RuntimeError):
    """What mayfly itself could not do, in its words."""


class MayflyEnvironment(BaseEnvironment):
    def __init__(self, *args, image=None, **kwargs):
        self._image = image  # before the rest: it is validated there
        super().__init__(*args, **kwargs)
        # Fit for a machine's name, and no other trial's.
        session = re.sub(r"[^A-Za-z0-9._-]", "-", self.session_id)[:40].lstrip("._-")
        self._name = f"hb-{session}-{secrets.token_hex(4)}"
        self._shell = "sh"

    # --- What it can do ----------------------------------------------------------------------

    @staticmethod
    def type():
        return "mayfly"

    @property
    def capabilities(self):
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def preflight(cls):
        if not shutil.which(program()):
            raise SystemExit(f"no program '{program()}': install mayfly, or set MAYFLY")
        doctor = subprocess.run([program(), "doctor"], capture_output=True, text=True)
        if doctor.returncode:
            raise SystemExit("mayfly cannot run machines here:\n" + doctor.stdout)

    def _validate_definition(self):
        if not self._machine_image():
            raise FileNotFoundError(
                "mayfly builds no Dockerfile: give the task a docker_image, or this environment "
                "image=NAME, of one in `mayfly image ls` (docker save IMAGE | mayfly image import "
                "NAME -)")

    def _machine_image(self):
        docker_image = getattr(self.task_env_config, "docker_image", None)
        # As images are called here: no registry, no tag.
        return self._image or (docker_image and docker_image.split("/")[-1].split("@")[0]
                               .replace(":", "-"))

    # --- The program -------------------------------------------------------------------------

    async def _mayfly(self, *args, check=True):
        process = await asyncio.create_subprocess_exec(
            program(), *args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
        try:
            out, err = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        out, err = out.decode(errors="replace"), err.decode(errors="replace")
        own = process.returncode == OWN_FAILURE and err.startswith("mayfly ")
        if own or (check and process.returncode):
            raise MayflyError(err.strip() or f"mayfly {args[0]} ended with {process.returncode}")
        return process.returncode, out, err

    # --- Life --------------------------------------------------------------------------------

    def _machine_options(self):
        image = self._machine_image()
        options = [] if image == BUILTIN else ["--image", image]
        if self._effective_memory_mb:
            options += ["--memory", f"{self._effective_memory_mb}M"]
        if self._effective_cpus:
            options += ["--cpus", str(self._effective_cpus)]
        if not self._network_disabled:
            options += ["--net", "passt"]
        return options

    async def start(self, force_build):
        if force_build:
            self.logger.debug("mayfly builds no images: there is nothing to force")
        try:
            await self._mayfly("up", self._name, "--timeout", f"{START_SECONDS}s",
                               *self._machine_options())
            bash = await self.exec("command -v bash", user="root")
            self._shell = "bash" if bash.return_code == 0 else "sh"
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self._remove()
            raise

    async def _remove(self):
        try:
            await self._mayfly("rm", "--force", self._name)
        except MayflyError as error:
            self.logger.warning(f"{self._name}: {error}")

    async def stop(self, delete):
        if delete:
            await self._remove()
        else:
            await self._mayfly("down", self._name)

    # --- Commands and files ------------------------------------------------------------------

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        options = []
        cwd = cwd or getattr(self.task_env_config, "workdir", None)
        user = self._resolve_user(user)
        if cwd:
            options += ["--workdir", cwd]
        if user is not None:
            options += ["--user", str(user)]
        if timeout_sec:
            options += ["--timeout", f"{int(timeout_sec)}s"]
        for name, value in (self._merge_env(env) or {}).items():
            options += ["--env", f"{name}={value}"]
        status, out, err = await self._mayfly("exec", *options, self._name, "--", self._shell,
                                              "-c", command, check=False)
        return ExecResult(stdout=out, stderr=err, return_code=status)

    async def _make_dir(self, path):
        result = await self.exec(f"mkdir -p {shlex.quote(str(path))}", cwd="/", user="root")
        if result.return_code:
            raise MayflyError(f"mkdir {path}: {result.stderr}")

    async def upload_file(self, source_path, target_path):
        await self._make_dir(PurePosixPath(target_path).parent)
        await self._mayfly("cp", "--quiet", str(Path(source_path).absolute()),
                           f"{self._name}:{target_path}")

    async def upload_dir(self, source_dir, target_dir):
        await self._make_dir(target_dir)
        await self._mayfly("cp", "--quiet", f"{Path(source_dir).absolute()}/.",
                           f"{self._name}:{target_dir}")

    async def download_file(self, source_path, target_path):
        target = Path(target_path).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._mayfly("cp", "--quiet", f"{self._name}:{source_path}", str(target))

    async def download_dir(self, source_dir, target_dir):
        target = Path(target_dir).absolute()
        target.mkdir(parents=True, exist_ok=True)
        await self._mayfly("cp", "--quiet", f"{self._name}:{source_dir}/.", str(target))
