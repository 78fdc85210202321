// The ops of rotary position embedding.
#include "op.h"
#include "rotary.h"

namespace compilepass {
namespace {

// The tensor itself where the elements of a row are adjacent.
Tensor with_dense_rows(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(t.dim() - 1) == 1 ? t : dense(t);
}

// What cos or sin moves by along a leading dim of x, 0 where it has one row for all of them.
int64_t table_step(const Tensor& table, const Tensor& x, int64_t skipped, int64_t dim) {
  const int64_t at = dim - (x.dim() - 1 - skipped - (table.dim() - 1));
  if (at < 0 || at >= table.dim() - 1) return 0;
  STD_TORCH_CHECK(
      table.size(at) == 1 || table.size(at) == x.size(dim), "cos and sin broadcast against x.");
  return table.size(at) == 1 ? 0 : table.stride(at);
}

struct Options {
  bool interleaved, per_pair;
  bool wide = false;
  int64_t skipped = 0;  // dims of x, the last of the leading ones, that the tables do not have
};

struct HeadNorm {
  float eps;
  const std::string& variant;
};

// The tensors of one rotation as the kernels read them.
struct Rotated {
  Tensor x, cos, sin, out;
  std::optional<Tensor> weight;

  Rotated(
      const Tensor& x, const Tensor& cos, const Tensor& sin,
      const std::optional<Tensor>& weight = std::nullopt)
      : x(with_dense_rows(x)),
        cos(with_dense_rows(cos)),
        sin(with_dense_rows(sin)),
        out(empty(x, x.size(-1), x.scalar_type())) {
    if (weight) {
      norm_width(x, *weight);
      this->weight = dense(*weight);
    }
  }

  template <class T>
  Rotation<T> rotation(const Options& options) const {
    STD_TORCH_CHECK(
        cos.dim() > 0 && sin.dim() > 0 && cos.size(-1) == sin.size(-1),
        "cos and sin are equally wide.");
    const int64_t width = x.size(-1), turned = cos.size(-1) * (options.per_pair ? 2 : 1);
    STD_TORCH_CHECK(
        turned % 2 == 0 && turned <= width,
        "cos and sin hold a value for what is rotated of a row of ", width, " elements.");
    const int64_t leading = x.dim() - 1;
    STD_TORCH_CHECK(
        std::max(cos.dim(), sin.dim()) - 1 <= leading - options.skipped,
        "cos and sin have no more dimensions than x.");
    Rotation<T> r{
        data<T>(x), data<T>(cos), data<T>(sin), data_or_null<T>(weight), mutable_data<T>(out),
        width, turned, x.numel() / width, {}};
    for (int64_t d = 0; d < leading; ++d) {
      r.lead.add(
          x.size(d),
          {x.stride(d), table_step(cos, x, options.skipped, d),
           table_step(sin, x, options.skipped, d)});
    }
    return r;
  }
};

template <class Body>
void choose(bool flag, const Body& body) {
  flag ? body(std::true_type{}) : body(std::false_type{});
}

// Rotates one tensor or several in one go, with a norm of each head before or without.
template <size_t N>
void run(
    const std::array<Rotated, N>& tensors, const Options& options,
    const std::optional<HeadNorm>& norm = std::nullopt) {
  with_storage(tensors[0].x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    const auto rotations = [&]<size_t... I>(std::index_sequence<I...>) {
      return std::array{tensors[I].template rotation<T>(options)...};
    }(std::make_index_sequence<N>{});
    const auto all = [&](const auto& body) {
      for_rotations<T>(std::span<const Rotation<T>>(rotations), body);
    };
    choose(options.interleaved, [&]<class Interleaved>(Interleaved) {
      choose(options.per_pair, [&]<class PerPair>(PerPair) {
        if (norm) {
          all([&](const Rotation<T>& r, int64_t begin, int64_t end) {
            with_weight(norm->variant, r.weight, [&](const auto& weight) {
              norm_rotate_rows<Interleaved::value, PerPair::value>(
                  r, weight, norm->eps, begin, end);
            });
          });
        } else {
          choose(options.wide, [&]<class IsWide>(IsWide) {
            all([](const Rotation<T>& r, int64_t begin, int64_t end) {
              rotate_rows<Interleaved::value, PerPair::value, IsWide::value>(r, begin, end);
            });
          });
        }
      });
    });
  });
}

bool has_few_dims(const Tensor& x) { return x.dim() - 1 <= static_cast<int64_t>(Lead::kMost); }

bool are_heads(const Tensor& q, const Tensor& k) {
  return has_few_dims(q) && has_few_dims(k) && k.dim() > 0 && k.size(-1) > 0;
}

// Whether cos and sin can be the tables of heads that are taken.
bool takes_tables(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  return q.dim() > 1 && k.dim() > 1 && are_heads(q, k) && cos.is_cpu() && sin.is_cpu() &&
      is_storage(cos.scalar_type()) && is_storage(sin.scalar_type()) && !needs_grad(cos, sin);
}

Tensor as_dtype(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
}

Tensor rotate(
    const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool per_pair,
    bool wide) {
  if (!takes(x, cos, sin) || !has_few_dims(x)) {
    return call<Tensor>("compilepass_native::rotate", x, cos, sin, interleaved, per_pair, wide);
  }
  const std::array all{Rotated(x, cos, sin)};
  run(all, {interleaved, per_pair, wide});
  return all[0].out;
}

std::tuple<Tensor, Tensor> rotate_qk(
    const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved,
    bool per_pair, bool wide) {
  if (!takes(q, k, cos, sin) || !are_heads(q, k)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rotate_qk", q, k, cos, sin, interleaved, per_pair, wide);
  }
  const std::array all{Rotated(q, cos, sin), Rotated(k, cos, sin)};
  run(all, {interleaved, per_pair, wide});
  return {all[0].out, all[1].out};
}

std::tuple<Tensor, Tensor> rotary_embedding(
    const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  if (!takes(q, k) || !takes_tables(q, k, cos, sin)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rotary_embedding", q, k, cos, sin, interleaved);
  }
  const Tensor c = as_dtype(cos, q.scalar_type()), s = as_dtype(sin, q.scalar_type());
  const std::array all{Rotated(q, c, s), Rotated(k, c, s)};
  run(all, {interleaved, true, false, 1});
  return {all[0].out, all[1].out};
}

std::tuple<Tensor, Tensor> qk_norm_rope(
    const Tensor& q, const Tensor& k, const Tensor& q_weight, const Tensor& k_weight,
    const Tensor& cos, const Tensor& sin, double eps, bool interleaved, std::string variant) {
  if (!takes(q, k, q_weight, k_weight) || !takes_tables(q, k, cos, sin)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::qk_norm_rope", q, k, q_weight, k_weight, cos, sin, eps, interleaved,
        variant);
  }
  const Tensor c = as_dtype(cos, q.scalar_type()), s = as_dtype(sin, q.scalar_type());
  const std::array all{Rotated(q, c, s, q_weight), Rotated(k, c, s, k_weight)};
  run(all, {interleaved, true, false, 1}, HeadNorm{static_cast<float>(eps), variant});
  return {all[0].out, all[1].out};
}

Tensor rms_norm_rotate(
    const Tensor& x, const Tensor& weight, const Tensor& cos, const Tensor& sin, double eps,
    std::string variant, bool interleaved, bool per_pair) {
  if (!takes(x, weight, cos, sin) || !has_few_dims(x)) {
    return call<Tensor>(
        "compilepass_native::rms_norm_rotate", x, weight, cos, sin, eps, variant, interleaved,
        per_pair);
  }
  const std::array all{Rotated(x, cos, sin, weight)};
  run(all, {interleaved, per_pair}, HeadNorm{static_cast<float>(eps), variant});
  return all[0].out;
}

std::tuple<Tensor, Tensor> rms_norm_rotate_qk(
    const Tensor& q, const Tensor& k, const Tensor& q_weight, const Tensor& k_weight,
    const Tensor& cos, const Tensor& sin, double eps, std::string variant, bool interleaved,
    bool per_pair) {
  if (!takes(q, k, q_weight, k_weight, cos, sin) || !are_heads(q, k)) {
    return call<std::tuple<Tensor, Tensor>>(
        "compilepass_native::rms_norm_rotate_qk", q, k, q_weight, k_weight, cos, sin, eps, variant,
        interleaved, per_pair);
  }
  const std::array all{Rotated(q, cos, sin, q_weight), Rotated(k, cos, sin, k_weight)};
  run(all, {interleaved, per_pair}, HeadNorm{static_cast<float>(eps), variant});
  return {all[0].out, all[1].out};
}

}  // namespace

Entries rotary_entries() {
  return {
      {"qk_norm_rope", TORCH_BOX(&qk_norm_rope)},
      {"rms_norm_rotate", TORCH_BOX(&rms_norm_rotate)},
      {"rms_norm_rotate_qk", TORCH_BOX(&rms_norm_rotate_qk)},
      {"rotary_embedding", TORCH_BOX(&rotary_embedding)},
      {"rotate", TORCH_BOX(&rotate)},
      {"rotate_qk", TORCH_BOX(&rotate_qk)},
  };
}

}  // namespace compilepass
