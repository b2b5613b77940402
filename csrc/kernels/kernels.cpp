#include "kernels/kernels.h"

#include <stdexcept>

namespace neso {

// Each table is defined in the source file of the same name.
namespace generic { extern const Kernels kernels; }
#if defined(NESO_X86)
namespace avx2 { extern const Kernels kernels; }
namespace avx_vnni { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_vnni { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }
#endif
#if defined(NESO_AARCH64)
namespace neon_dot { extern const Kernels kernels; }
namespace neon_bf16 { extern const Kernels kernels; }
#endif

const Kernels& kernels_for(Isa isa) {
    switch (isa) {
        case Isa::generic: return generic::kernels;
#if defined(NESO_X86)
        case Isa::avx2: return avx2::kernels;
        case Isa::avx_vnni: return avx_vnni::kernels;
        case Isa::avx512: return avx512::kernels;
        case Isa::avx512_vnni: return avx512_vnni::kernels;
        case Isa::avx512_bf16: return avx512_bf16::kernels;
        case Isa::amx: return amx::kernels;
#endif
#if defined(NESO_AARCH64)
        case Isa::neon_dot: return neon_dot::kernels;
        case Isa::neon_bf16: return neon_bf16::kernels;
#endif
        default: break;
    }
    throw std::invalid_argument(std::string("kernels for ") + isa_name(isa) + " were not compiled in");
}

}  // namespace neso
