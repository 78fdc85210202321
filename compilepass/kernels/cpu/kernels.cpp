// The CPU kernels as torch ops, on PyTorch's stable ABI: one build serves torch 2.11 and later.
#include <cstring>

#include "op.h"

namespace compilepass {

// A family of ops, each in the source file of its name.
Entries activations_entries();
Entries linear_entries();
Entries norms_entries();
Entries quantisation_entries();
Entries rotary_entries();

}  // namespace compilepass

// Puts the kernel of that name at the op's CPU dispatch key, for the life of the process; returns 0
// when done. Op by op, so that a provider of higher priority can be there instead.
extern "C" __attribute__((visibility("default"))) int compilepass_register(const char* name) {
  using namespace compilepass;
  for (const auto& family :
       {activations_entries, linear_entries, norms_entries, quantisation_entries, rotary_entries}) {
    for (const auto& entry : family()) {
      if (std::strcmp(entry.name, name) != 0) continue;
      TorchLibraryHandle library = nullptr;
      if (aoti_torch_library_init_impl("compilepass", "CPU", __FILE__, __LINE__, &library)) return 1;
      return torch_library_impl(library, name, entry.boxed, TORCH_ABI_VERSION);
    }
  }
  return 1;
}
