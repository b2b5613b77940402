"""Program of a model's process: `python bootstrap.py SOCKET FROM_SERVER TO_SERVER` (descriptors).

The model's Python environment need not contain Neso. The package is therefore imported from the location of this file.
Its parent folder is not added to `sys.path`, because that would expose unrelated packages.
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

arguments = sys.argv[1:]
sys.argv[1:] = []  # not for the model: `unittest.main` and other libraries read them
main(*map(int, arguments))
