// The ops of normalisation.
#include <optional>

#include "norms.h"
#include "op.h"

namespace compilepass {
namespace {

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

// A parameter of a layer norm, which may have none.
std::optional<Tensor> parameter(const std::optional<Tensor>& t, const Tensor& x) {
  if (!t) return t;
  norm_width(x, *t);
  return dense(*t);
}

bool takes_affine(
    const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias) {
  return takes(x, residual, weight.value_or(x), bias.value_or(x));
}

Tensor layer_norm(
    const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
  if (!takes_affine(x, x, weight, bias)) {
    return call<Tensor>("compilepass_native::layer_norm", x, weight, bias, eps);
  }
  const int64_t width = x.size(-1);
  const Tensor out = empty(x, width, x.scalar_type()), rows = dense(x);
  const auto weights = parameter(weight, x), biases = parameter(bias, x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const LayerNorm<T> source{
        data<T>(rows), {data_or_null<T>(weights), data_or_null<T>(biases)},
        static_cast<float>(eps), width};
    run<T>(source, out, x.numel() / width, width);
  });
  return out;
}

std::tuple<Tensor, Tensor> fused_add_layer_norm(
    const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
    std::optional<Tensor> bias, double eps) {
  if (!takes_affine(x, residual, weight, bias)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::fused_add_layer_norm", x, residual, weight, bias, eps);
  }
  check_same_shape(x, residual, "x and residual");
  const int64_t width = x.size(-1);
  const Tensor out = empty(x, width, x.scalar_type()), total = empty(x, width, x.scalar_type());
  const Tensor rows = dense(x), residuals = dense(residual);
  const auto weights = parameter(weight, x), biases = parameter(bias, x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const AddLayerNorm<T> source{
        data<T>(rows), data<T>(residuals), mutable_data<T>(total),
        {data_or_null<T>(weights), data_or_null<T>(biases)}, static_cast<float>(eps), width};
    run<T>(source, out, x.numel() / width, width);
  });
  return {out, total};
}

}  // namespace

Entries norms_entries() {
  return {
      {"fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm)},
      {"fused_add_rms_norm_dynamic_int8_quant", TORCH_BOX(&fused_add_rms_norm_dynamic_int8_quant)},
      {"fused_add_layer_norm", TORCH_BOX(&fused_add_layer_norm)},
      {"layer_norm", TORCH_BOX(&layer_norm)},
      {"rms_norm", TORCH_BOX(&rms_norm)},
      {"rms_norm_dynamic_int8_quant", TORCH_BOX(&rms_norm_dynamic_int8_quant)},
  };
}

}  // namespace compilepass
