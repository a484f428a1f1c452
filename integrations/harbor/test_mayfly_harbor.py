# SPDX-License-Identifier: Apache-2.0
"""The environment against Harbor's interface: python3 -m unittest, in this folder.

Where Harbor is installed, against its own classes; in any case against a stub with the members that
are used. With MAYFLY and MAYFLY_IMAGE set, on a real machine, too.
"""
import asyncio
import importlib
import importlib.util
import inspect
import json
import logging
import os
import stat
import sys
import tempfile
import types
import unittest
from abc import ABC, abstractmethod
from pathlib import Path

HERE = Path(__file__).parent
HARBOR = importlib.util.find_spec("harbor")


def stub():
    """The part of Harbor that the environment relies on, as far as it is published."""
    class ExecResult:
        def __init__(self, return_code, stdout=None, stderr=None):
            self.stdout, self.stderr, self.return_code = stdout, stderr, return_code

    class EnvironmentCapabilities:
        def __init__(self, disable_internet=False):
            self.disable_internet = disable_internet

    class BaseEnvironment(ABC):
        def __init__(self, environment_dir, environment_name, session_id, trial_paths,
                     task_env_config, logger=None, network_disabled=False, mounts=(), **kwargs):
            self.environment_dir, self.session_id = environment_dir, session_id
            self.task_env_config, self.default_user = task_env_config, None
            self.logger = logger or logging.getLogger("stub")
            self._network_disabled, self._mounts = network_disabled, mounts
            self._effective_cpus = getattr(task_env_config, "cpus", None)
            self._effective_memory_mb = getattr(task_env_config, "memory_mb", None)
            self._validate_definition()

        def _resolve_user(self, user):
            return self.default_user if user is None else user

        def _merge_env(self, env):
            return {"PERSISTENT": "1", **(env or {})}

        def _mount_targets(self, writable_only=False):
            return list(self._mounts)

        async def ensure_dirs(self, dirs, chmod=True):
            for path in dirs:
                assert (await self.exec(f"mkdir -p {path}", user="root")).return_code == 0

        async def _upload_environment_dir_after_start(self):
            pass

        @staticmethod
        @abstractmethod
        def type(): ...
        @abstractmethod
        def _validate_definition(self): ...
        @abstractmethod
        async def start(self, force_build): ...
        @abstractmethod
        async def stop(self, delete): ...
        @abstractmethod
        async def upload_file(self, source_path, target_path): ...
        @abstractmethod
        async def upload_dir(self, source_dir, target_dir): ...
        @abstractmethod
        async def download_file(self, source_path, target_path): ...
        @abstractmethod
        async def download_dir(self, source_dir, target_dir): ...
        @abstractmethod
        async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None): ...

    modules = {name: types.ModuleType(name) for name in (
        "harbor", "harbor.environments", "harbor.environments.base",
        "harbor.environments.capabilities")}
    modules["harbor.environments.base"].BaseEnvironment = BaseEnvironment
    modules["harbor.environments.base"].ExecResult = ExecResult
    modules["harbor.environments.capabilities"].EnvironmentCapabilities = EnvironmentCapabilities
    return modules


def load(modules):
    """mayfly_harbor, over these modules in the place of Harbor's."""
    kept = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        spec = importlib.util.spec_from_file_location("mayfly_harbor", HERE / "mayfly_harbor.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for name, module_before in kept.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


def environment(module, image="base", **kwargs):
    config = types.SimpleNamespace(docker_image=None, workdir=None, cpus=kwargs.pop("cpus", None),
                                   memory_mb=kwargs.pop("memory_mb", None))
    return module.MayflyEnvironment(Path("."), "task", "task/one__x1", None, config, image=image,
                                    **kwargs)


@unittest.skipUnless(HARBOR, "harbor is not installed here (pip install harbor)")
class Published(unittest.TestCase):
    def test_it_is_one_of_harbors(self):
        base = importlib.import_module("harbor.environments.base").BaseEnvironment
        ours = load({}).MayflyEnvironment
        self.assertTrue(issubclass(ours, base))
        self.assertEqual(ours.__abstractmethods__, frozenset())
        for name in ("start", "stop", "exec", "upload_file", "upload_dir", "download_file",
                     "download_dir"):
            wanted = list(inspect.signature(getattr(base, name)).parameters)
            got = list(inspect.signature(getattr(ours, name)).parameters)
            self.assertEqual(got[:len(wanted)], wanted, name)
        for name in ("_resolve_user", "_merge_env", "_mount_targets", "ensure_dirs",
                     "_upload_environment_dir_after_start", "_network_disabled",
                     "_effective_cpus", "_effective_memory_mb"):
            self.assertTrue(hasattr(base, name), name)


class Commands(unittest.TestCase):
    """What is asked of the program: one that writes down its arguments takes its place."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.log = Path(self.folder.name) / "log"
        fake = Path(self.folder.name) / "mayfly"
        fake.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"print(json.dumps(sys.argv[1:]), file=open({str(self.log)!r}, 'a'))\n"
            "if 'fail' in sys.argv[-1]: sys.exit(3)\n"
            "if 'broken' in sys.argv[-1]:\n"
            "    print('mayfly exec: it has ended', file=sys.stderr); sys.exit(125)\n"
            "print('out')\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        self.before = os.environ.get("MAYFLY")
        os.environ["MAYFLY"] = str(fake)
        self.module = load(stub())

    def tearDown(self):
        del os.environ["MAYFLY"]
        if self.before is not None:
            os.environ["MAYFLY"] = self.before

    def asked(self):
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        self.log.unlink()
        return lines

    def test_life(self):
        env = environment(self.module, cpus=2, memory_mb=512, mounts=["/logs/agent"])
        asyncio.run(env.start(False))
        up, bash, logs = self.asked()
        name = up[1]
        self.assertRegex(name, r"^hb-task-one__x1-[0-9a-f]{8}$")
        self.assertEqual(up, ["up", name, "--timeout", "300s", "--image", "base", "--memory",
                              "512M", "--cpus", "2", "--net", "passt"])
        self.assertEqual(bash[-1], "command -v bash")
        self.assertEqual(logs[-3:], ["bash", "-c", "mkdir -p /logs/agent"])
        asyncio.run(env.stop(False))
        asyncio.run(env.stop(True))
        self.assertEqual(self.asked(), [["down", name], ["rm", "--force", name]])

    def test_no_network(self):
        env = environment(self.module, network_disabled=True)
        self.assertTrue(env.capabilities.disable_internet)
        asyncio.run(env.start(False))
        self.assertNotIn("--net", self.asked()[0])

    def test_exec(self):
        env = environment(self.module)
        result = asyncio.run(env.exec("echo x", cwd="/w", env={"A": "b c"}, timeout_sec=7,
                                      user=1000))
        self.assertEqual((result.return_code, result.stdout), (0, "out\n"))
        self.assertEqual(self.asked(), [[
            "exec", "--workdir", "/w", "--user", "1000", "--timeout", "7s", "--env",
            "PERSISTENT=1", "--env", "A=b c", env._name, "--", "sh", "-c", "echo x"]])
        self.assertEqual(asyncio.run(env.exec("fail")).return_code, 3)
        with self.assertRaisesRegex(self.module.MayflyError, "it has ended"):
            asyncio.run(env.exec("broken"))

    def test_images(self):
        with self.assertRaisesRegex(FileNotFoundError, "mayfly image import"):
            environment(self.module, image=None)
        env = environment(self.module)
        env._image = None
        env.task_env_config.docker_image = "ghcr.io/x/python:3.12"
        self.assertEqual(env._machine_image(), "python-3.12")


@unittest.skipUnless(os.environ.get("MAYFLY_IMAGE"), "no MAYFLY_IMAGE: not on a real machine")
class Real(unittest.TestCase):
    def test_a_trial(self):
        module = load(stub())
        asyncio.run(self.trial(environment(
            module, os.environ["MAYFLY_IMAGE"], memory_mb=128, network_disabled=True,
            mounts=["/logs/agent"])))

    async def trial(self, env):
        await env.start(False)
        try:
            with tempfile.TemporaryDirectory() as folder:
                await self.steps(env, Path(folder))
        finally:
            await env.stop(True)

    async def steps(self, env, folder):
        (folder / "src/deep").mkdir(parents=True)
        (folder / "src/deep/file").write_text("text")
        await env.upload_dir(folder / "src", "/work/src")
        await env.upload_file(folder / "src/deep/file", "/work/new/one")
        result = await env.exec("cat src/deep/file new/one; echo $A >&2; exit 3", cwd="/work",
                                env={"A": "b"})
        self.assertEqual((result.return_code, result.stdout, result.stderr),
                         (3, "texttext", "b\n"))
        await env.download_dir("/work", folder / "out")
        await env.download_file("/work/new/one", folder / "there/two")
        self.assertEqual((folder / "out/src/deep/file").read_text(), "text")
        self.assertEqual((folder / "there/two").read_text(), "text")
        self.assertEqual((await env.exec("test -d /logs/agent")).return_code, 0)


if __name__ == "__main__":
    unittest.main()
