#include "bindings/bindings.h"

namespace neso {

void bind_isa(nb::module_& m) {
    m.def(
        "supported_isas",
        [] {
            std::vector<std::string> names;
            for (Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
            return names;
        },
        "Levels of instruction sets that this CPU can run, best first.");
    m.def(
        "default_isa", [] { return std::string(isa_name(default_isa())); },
        "The level that NESO_ISA names, else the best. Raises ValueError for one that this CPU does not have.");
}

}  // namespace neso
