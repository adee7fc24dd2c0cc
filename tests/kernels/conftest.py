"""Where the test extra does not bring Triton; everywhere else its absence is an error, no skip."""

import platform

collect_ignore_glob = (
    [] if (platform.system(), platform.machine()) == ("Linux", "x86_64") else ["test_triton_*.py"]
)
