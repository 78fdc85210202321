// The ops of quantisation.
#include "op.h"

namespace compilepass {
namespace {

void quantise(const Tensor& x, const Quantised& out, bool by_largest) {
  const Tensor rows = dense(x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const int64_t width = out.to.width;
    quantise_rows<T>(
        Rows<T>{data<T>(rows), width}, out.to, std::get<Sink<T>>(out.sinks), x.numel() / width,
        by_largest);
  });
}

std::tuple<Tensor, Tensor> quant_int8(const Tensor& x) {
  if (!takes(x)) return call<std::tuple<Tensor, Tensor>>("compilepass_native::quant_int8", x);
  const Quantised out = DynamicInt8::of(x, x.size(-1));
  quantise(x, out, true);
  return {out.q, *out.scale};
}

std::tuple<Tensor, Tensor, Tensor> asymmetric_quant_int8(const Tensor& x) {
  if (!takes(x)) {
    return call<std::tuple<Tensor, Tensor, Tensor>>("compilepass_native::asymmetric_quant_int8", x);
  }
  const Quantised out = AsymmetricInt8::of(x, x.size(-1));
  quantise(x, out, true);
  return {out.q, *out.scale, *out.zero_point};
}

Tensor static_quant_int8(const Tensor& x, const Tensor& scale, std::optional<Tensor> zero_point) {
  const bool taken = zero_point ? StaticAsymmetricInt8::takes(scale, *zero_point)
                                : StaticInt8::takes(scale);
  if (!takes(x) || !taken) {
    return call<Tensor>("compilepass_native::static_quant_int8", x, scale, zero_point);
  }
  const Quantised out = zero_point
      ? StaticAsymmetricInt8::of(x, x.size(-1), scale, *zero_point)
      : StaticInt8::of(x, x.size(-1), scale);
  quantise(x, out, false);
  return out.q;
}

std::tuple<Tensor, Tensor> quant_fp8(const Tensor& x) {
  if (!takes(x)) return call<std::tuple<Tensor, Tensor>>("compilepass_native::quant_fp8", x);
  const Quantised out = DynamicFp8::of(x, x.size(-1));
  quantise(x, out, true);
  return {out.q, *out.scale};
}

std::tuple<Tensor, Tensor> group_quant_fp8(const Tensor& x, int64_t group) {
  if (!takes(x)) {
    return call<std::tuple<Tensor, Tensor>>("compilepass_native::group_quant_fp8", x, group);
  }
  const Quantised out = GroupFp8::of(x, x.size(-1), group);
  quantise(x, out, false);
  return {out.q, *out.scale};
}

Tensor static_quant_fp8(const Tensor& x, const Tensor& scale) {
  if (!takes(x) || !StaticFp8::takes(scale)) {
    return call<Tensor>("compilepass_native::static_quant_fp8", x, scale);
  }
  const Quantised out = StaticFp8::of(x, x.size(-1), scale);
  quantise(x, out, false);
  return out.q;
}

}  // namespace

Entries quantisation_entries() {
  return {
      {"asymmetric_quant_int8", TORCH_BOX(&asymmetric_quant_int8)},
      {"group_quant_fp8", TORCH_BOX(&group_quant_fp8)},
      {"quant_fp8", TORCH_BOX(&quant_fp8)},
      {"quant_int8", TORCH_BOX(&quant_int8)},
      {"static_quant_fp8", TORCH_BOX(&static_quant_fp8)},
      {"static_quant_int8", TORCH_BOX(&static_quant_int8)},
  };
}

}  // namespace compilepass
