// The host side of short sequences: the calls that it takes, and the launch.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "../../include/flashsci_small.h"
#include "backward.cuh"
#include "forward.cuh"

namespace flashsci::sm80::small {

// Matrices that a direction reads, and may have in shared memory.
template <class Params>
inline constexpr int kOperands =
    std::is_same_v<Params, FlashsciBackwardParams> ? kOfBackward : kOfForward;

// Whether rows begin at multiples of this number of bytes.
template <class P>
bool aligned(int bytes, const void* data, const FlashsciStrides& strides) {
  const int64_t all = strides.batch0 | strides.batch1 | strides.head | strides.row;
  return all * static_cast<int64_t>(sizeof(typename P::Element)) % bytes == 0 &&
         reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Whether lanes can load and store rows four columns at a time.
template <class P>
bool by_fours(const void* data, const FlashsciStrides& strides, int columns) {
  constexpr int64_t kElement = sizeof(typename P::Element);
  return columns % 4 == 0 && aligned<P>(sizeof(typename P::Row), data, strides) &&
         Steps::fit(strides, kElement);
}

template <class Params>
bool is_weighted(const Params& p) {
  return p.bias_mask.bias != nullptr && p.bias_mask.bias_is_fp32 == FLASHSCI_KEY_WEIGHTS;
}

// The conditions that both directions share, except for the results.
template <class P, class Params>
bool takes(const Params& p) {
  return is_weighted(p) == P::kWeighted && (!P::kWeighted || p.heads_q == p.heads_k) &&
         p.cu_seqlens_q == nullptr && p.softcap == 0.f && p.seq_q <= kMostRows &&
         p.seq_k <= kMostRows && p.seq_q > 0 && p.seq_k > 0 &&
         std::max(p.head_dim, p.head_dim_v) <= kMostDim &&
         by_fours<P>(p.q, p.q_strides, p.head_dim) && by_fours<P>(p.k, p.k_strides, p.head_dim) &&
         by_fours<P>(p.v, p.v_strides, p.head_dim_v) && p.batch0 * p.batch1 * p.heads_q > 0 &&
         p.batch0 * p.batch1 * p.heads_q <= INT32_MAX;
}

// Calls act(shape) with the smallest shape that holds a call.
template <class Params, class Act>
auto with_shape(const Params& p, Act&& act) {
  const int dim = std::max(p.head_dim, p.head_dim_v), rows = std::max(p.seq_q, p.seq_k);
  const int dims = p.head_dim == p.head_dim_v ? p.head_dim : 0;
  const auto with_blocks = [&](auto blocks) {
    constexpr int kBlocks = decltype(blocks)::value;
    if (dims == 16) return act(Shape<kBlocks, 1, true>{});
    if (dims == 32) return act(Shape<kBlocks, 2, true>{});
    if (dims == 64) return act(Shape<kBlocks, 4, true>{});
    if (dim <= 32) return act(Shape<kBlocks, 2, false>{});
    return act(Shape<kBlocks, 4, false>{});
  };
  if (rows <= 16) return with_blocks(std::integral_constant<int, 2>{});
  if (rows <= 24) return with_blocks(std::integral_constant<int, 3>{});
  return with_blocks(std::integral_constant<int, 4>{});
}

// Warps per block. Heads of one row of memory are read at the same time.
inline int warps_of(int heads) {
  return heads % 4 != 0 && heads > 2 && heads < kMostWarps ? heads : 4;
}

// The same for rows that go through shared memory: a part of the heads of a batch member.
inline int staged_warps_of(int heads) {
  for (const int warps : {4, 6, 5, 7, 3, 2})
    if (heads % warps == 0) return warps;
  return 1;
}

// Bytes of rows that a block may have: a multiprocessor holds two blocks. In addition a block has 1
// KiB for the driver and 1 KiB of sums; one more keeps rows and sums within 48 KiB, which need no
// attribute, on multiprocessors with 100 KiB.
template <class Params>
int most_bytes(const Params& p) {
  return p.shared_per_sm / 2 - 3072;
}

// Whether rows of all operands, and of results, begin at multiples of 16 bytes.
template <class P, class Params>
bool by_pieces(const Params& p) {
  bool all = aligned<P>(16, p.q, p.q_strides) && aligned<P>(16, p.k, p.k_strides) &&
             aligned<P>(16, p.v, p.v_strides) && aligned<P>(16, p.out, p.out_strides);
  if constexpr (kOperands<Params> == kOfBackward)
    all = all && aligned<P>(16, p.dout, p.dout_strides) && aligned<P>(16, p.dq, p.dq_strides) &&
          aligned<P>(16, p.dk, p.dk_strides) && aligned<P>(16, p.dv, p.dv_strides);
  return all;
}

// The value of HeadPlan::same_strides.
template <class Params>
bool have_same_strides(const Params& p) {
  const auto same = [](const FlashsciStrides& x, const FlashsciStrides& y) {
    return x.batch0 == y.batch0 && x.batch1 == y.batch1 && x.head == y.head && x.row == y.row;
  };
  bool all = same(p.q_strides, p.k_strides) && same(p.q_strides, p.v_strides);
  if constexpr (kOperands<Params> == kOfBackward)
    all = all && same(p.dout_strides, p.out_strides) && same(p.dq_strides, p.dk_strides) &&
          same(p.dq_strides, p.dv_strides);
  return all;
}

// Calls act(shape, whether rows go through shared memory, heads for which a block has room there or
// 0, blocks, threads, bytes of those rows, plan). warps, staged_warps: per block, of direct kernels
// and of kernels with rows in shared memory.
template <class P, class Params, class Act>
auto with_launch(const Params& p, int warps, int staged_warps, Act&& act) {
  const bool same_strides = have_same_strides(p);
  return with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    const auto go = [&](auto staged, auto room, int of_block, int pieces, int pitch, int matrix,
                        int bytes) {
      const HeadPlan plan(p, sizeof(typename P::Element), S::kBlocks * 8, pieces, pitch, matrix,
                          same_strides);
      return act(shape, staged, room, (int64_t{plan.count} + of_block - 1) / of_block,
                 of_block * 32, bytes, plan);
    };
    const auto go_direct = [&] {
      return go(std::false_type{}, std::integral_constant<int, 0>{}, warps, 1, 0, 0, 0);
    };
    if constexpr (kStages<P, S>) {
      const auto go_staged = [&](auto room) {
        using Place = Stage<P, S, kOperands<Params>, decltype(room)::value>;
        const int pitch = Place::pitch_of(room > 0 ? static_cast<int>(room) : staged_warps);
        const int matrix = pitch * Place::rows_of_matrix(std::max(p.seq_q, p.seq_k));
        const int bytes = matrix * kOperands<Params> + staged_warps * int{Place::kStatisticsBytes};
        if (bytes > most_bytes(p)) return go_direct();
        return go(std::true_type{}, room, staged_warps, staged_warps * Place::kPieces, pitch,
                  matrix, bytes);
      };
      const bool wanted = kRowBytes<P, S> == 128 || p.q_strides.head < p.q_strides.row;
      if (wanted && staged_warps > 1 && p.heads_q == p.heads_k && by_pieces<P>(p)) {
        if constexpr (kRoomIsFixed<P, S, kOperands<Params>>)
          if (same_strides)
            return staged_warps <= kFewHeads ? go_staged(std::integral_constant<int, kFewHeads>{})
                                             : go_staged(std::integral_constant<int, kMostWarps>{});
        return go_staged(std::integral_constant<int, 0>{});
      }
    }
    return go_direct();
  });
}

// Launches a kernel whose shared memory depends on the call. Its limit is set once, to the largest
// size of any call.
template <auto kKernel, class Params, class... Arguments>
cudaError_t launch_rows(int64_t blocks, int threads, int bytes, cudaStream_t stream,
                        const Params& p, const Arguments&... arguments) {
  const cudaError_t error = allow_shared<kKernel>(bytes > 0 ? most_bytes(p) : 0, p.device);
  if (error != cudaSuccess) return error;
  return launch<kKernel>(blocks, threads, bytes, p.device, stream, p, arguments...);
}

template <class P>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (!takes<P>(p) || !by_fours<P>(p.out, p.out_strides, p.head_dim_v))
    return cudaErrorNotSupported;
  return with_launch<P>(
      p, warps_of(p.heads_q), staged_warps_of(p.heads_q),
      [&](auto shape, auto staged, auto room, int64_t blocks, int threads, int bytes,
          const HeadPlan& plan) {
        return launch_rows<small_forward_kernel<P, decltype(shape), decltype(staged)::value,
                                                decltype(room)::value>>(blocks, threads, bytes,
                                                                        stream, p, plan);
      });
}

// Whether every batch member has its own gradient of the bias; `form`: the form of that gradient.
inline bool has_dbias_form(const FlashsciBackwardParams& p, int& form) {
  form = kNoDbias;
  if (p.dbias == nullptr) return true;
  const FlashsciScoreStrides& s = p.dbias_strides;
  const auto own = [](int64_t size, int64_t stride) { return size == 1 || stride != 0; };
  if (!own(p.batch0, s.batch0) || !own(p.batch1, s.batch1) || !own(p.seq_k, s.column)) return false;
  const bool heads = own(p.heads_q, s.head);
  if (own(p.seq_q, s.row) && !is_weighted(p)) {
    form = kDbiasOfPairs;
    return heads;
  }
  form = heads ? kDbiasOfKeys : kDbiasOfHeads;
  return heads || p.heads_q <= kMostWarps;
}

template <class P>
cudaError_t launch_backward(const FlashsciBackwardParams& p, cudaStream_t stream) {
  const auto results = [&](const void* data, const FlashsciStrides& strides, int columns) {
    return data == nullptr || by_fours<P>(data, strides, columns);
  };
  int dbias;
  if (!takes<P>(p) || p.heads_q != p.heads_k || p.dout == nullptr ||
      !by_fours<P>(p.out, p.out_strides, p.head_dim_v) ||
      !by_fours<P>(p.dout, p.dout_strides, p.head_dim_v) ||
      !results(p.dq, p.dq_strides, p.head_dim) || !results(p.dk, p.dk_strides, p.head_dim) ||
      !results(p.dv, p.dv_strides, p.head_dim_v) || !has_dbias_form(p, dbias))
    return cudaErrorNotSupported;
  const bool all = dbias == kDbiasOfHeads;
  return with_launch<P>(
      p, all ? p.heads_q : warps_of(p.heads_q), all ? p.heads_q : staged_warps_of(p.heads_q),
      [&](auto shape, auto staged, auto room, int64_t blocks, int threads, int bytes,
          const HeadPlan& plan) {
        return launch_rows<small_backward_kernel<P, decltype(shape), decltype(staged)::value,
                                                 decltype(room)::value>>(blocks, threads, bytes,
                                                                         stream, p, plan, dbias);
      });
}

}  // namespace flashsci::sm80::small
