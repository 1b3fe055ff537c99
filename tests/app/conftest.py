"""The C stub of the driver's library, for the agent's front over a real one."""

from tests.fakes.nvml_fixtures import built, deadline, forgetful, stub, stub_driver, stub_path

__all__ = ["built", "deadline", "forgetful", "stub", "stub_driver", "stub_path"]
