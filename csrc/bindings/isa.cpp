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
        "Instruction set levels that this CPU supports, best first.");
    m.def(
        "default_isa", [] { return std::string(isa_name(default_isa())); },
        "The level named by NESO_ISA, by default the best. Raises ValueError for an unsupported level.");
}

}  // namespace neso
