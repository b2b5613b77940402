"""The program of a model's process: `python bootstrap.py SOCKET FROM_SERVER TO_SERVER` (descriptors).

It may be started by the Python of an environment that knows nothing of Neso. The package is therefore imported from
where this file is, without a place in `sys.path`, where it would bring its neighbours along.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

del sys.path[0]  # the folder of this file
package = Path(__file__).resolve().parents[3]
spec = spec_from_file_location("neso", package / "__init__.py", submodule_search_locations=[str(package)])
assert spec is not None and spec.loader is not None
module = module_from_spec(spec)
sys.modules["neso"] = module
spec.loader.exec_module(module)

from neso.backends.python.process.child import main  # noqa: E402

main(*map(int, sys.argv[1:]))
