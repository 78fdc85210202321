// The ops of normalisation.
#include "norms.h"
#include "op.h"

namespace compilepass {
namespace {

int64_t norm_width(const Tensor& x, const Tensor& weight) {
  const int64_t width = x.size(-1);
  STD_TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == width, "A norm's weight is as wide as its input, ",
      width, ".");
  return width;
}

// Calls body with what a norm's variant does with its weight.
template <class T, class Body>
void with_weight(const std::string& variant, const T* weight, const Body& body) {
  if (variant == "llama") return body(Weight<T, RoundedFirst<T>>{weight, {}});
  const float offset = variant == "gemma" ? 1.0f : 0.0f;
  STD_TORCH_CHECK(
      variant == "gemma" || variant == "torch", "variant is 'llama', 'torch' or 'gemma', not '",
      variant, "'.");
  body(Weight<T, RoundedLast>{weight, {offset}});
}

template <class Out>
void norm(
    const Tensor& x, const Tensor& weight, double eps, const std::string& variant,
    const Out& out) {
  const int64_t width = norm_width(x, weight);
  const Tensor rows = dense(x), weights = dense(weight);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    with_weight(variant, data<T>(weights), [&]<class Apply>(const Weight<T, Apply>& weight) {
      const Norm<T, Apply> source{data<T>(rows), weight, static_cast<float>(eps), width};
      run<T>(source, out, x.numel() / width, width);
    });
  });
}

template <class Out>
void add_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
    const std::string& variant, const Out& out, const Tensor& total) {
  const int64_t width = norm_width(x, weight);
  check_same_shape(x, residual, "x and residual");
  const Tensor rows = dense(x), residuals = dense(residual), weights = dense(weight);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    with_weight(variant, data<T>(weights), [&]<class Apply>(const Weight<T, Apply>& weight) {
      const AddNorm<T, Apply> source{
          data<T>(rows), data<T>(residuals), mutable_data<T>(total), weight,
          static_cast<float>(eps), width};
      run<T>(source, out, x.numel() / width, width);
    });
  });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, weight)) {
    return call<Tensor>("compilepass_native::rms_norm", x, weight, eps, variant);
  }
  const Tensor out = empty(x, x.size(-1), x.scalar_type());
  norm(x, weight, eps, variant, out);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_dynamic_int8_quant(
    const Tensor& x, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, weight)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rms_norm_dynamic_int8_quant", x, weight, eps, variant);
  }
  const Quantised out(x, x.size(-1));
  norm(x, weight, eps, variant, out);
  return {out.q, out.scale};
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, residual, weight)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::fused_add_rms_norm", x, residual, weight, eps, variant);
  }
  const Tensor out = empty(x, x.size(-1), x.scalar_type());
  const Tensor total = empty(x, x.size(-1), x.scalar_type());
  add_norm(x, residual, weight, eps, variant, out, total);
  return {out, total};
}

std::tuple<Tensor, Tensor, Tensor> fused_add_rms_norm_dynamic_int8_quant(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, std::string variant) {
  if (!takes(x, residual, weight)) {
    return call<std::tuple<Tensor, Tensor, Tensor>>(
        "compilepass_native::fused_add_rms_norm_dynamic_int8_quant", x, residual, weight, eps, variant);
  }
  const Quantised out(x, x.size(-1));
  const Tensor total = empty(x, x.size(-1), x.scalar_type());
  add_norm(x, residual, weight, eps, variant, out, total);
  return {out.q, out.scale, total};
}

}  // namespace

Entries norms_entries() {
  return {
      {"fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm)},
      {"fused_add_rms_norm_dynamic_int8_quant", TORCH_BOX(&fused_add_rms_norm_dynamic_int8_quant)},
      {"rms_norm", TORCH_BOX(&rms_norm)},
      {"rms_norm_dynamic_int8_quant", TORCH_BOX(&rms_norm_dynamic_int8_quant)},
  };
}

}  // namespace compilepass
