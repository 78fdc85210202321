// The ops of quantisation.
#include "op.h"

namespace compilepass {
namespace {

std::tuple<Tensor, Tensor> quant_int8(const Tensor& x) {
  if (!takes(x)) return call<std::tuple<Tensor, Tensor>>("compilepass_native::quant_int8", x);
  const int64_t width = x.size(-1);
  const Quantised out(x, width);
  const Tensor rows = dense(x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    run<T>(Rows<T>{data<T>(rows), width}, out, x.numel() / width, width);
  });
  return {out.q, out.scale};
}

}  // namespace

Entries quantisation_entries() {
  return {
      {"quant_int8", TORCH_BOX(&quant_int8)},
  };
}

}  // namespace compilepass
