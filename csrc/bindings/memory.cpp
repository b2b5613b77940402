#include "bindings/bindings.h"
#include "model/zero_pages.h"

namespace neso {

void bind_memory(nb::module_& m) {
    m.def(
        "zero_pages",
        [](int64_t bytes) {
            auto* pages = new ZeroPages(bytes);
            nb::capsule owner(pages, [](void* held) noexcept { delete static_cast<ZeroPages*>(held); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(pages->data(), {size_t(bytes)}, owner);
        },
        nb::arg("bytes"), "Zeroed memory in huge pages, if available, as a numpy array uint8[bytes].");
}

}  // namespace neso
