// Adds dQ to its fp32 accumulator, at head dims above 128: in pieces of columns.
#pragma once
#include <cstdint>

#include "../../ptx/bulk.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "config_d256.cuh"

namespace flashsci::sm90::bwd {

// dQ of consumer w. Its first pieces belong to the block before the first, and are zero.
template <class C, bool kVarlen>
__device__ __forceinline__ void add_dq_d256(BackwardStorage<C>& shared, const BackwardArgs& a,
                                            const KeyTile& tile, int w) {
  ptx::wait_for_prerequisites();  // may still clear the accumulator
  const bool turns = a.dq_semaphores != nullptr && semaphores_come<kVarlen>(a);
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int begin = C::dq_begin(rank, w), end = begin + C::owned_columns(w);
  uint32_t count = 0;
  const auto wait = [&] { sleep_for(shared.dq_full[0][w], count++); };
  const auto pass = [&] { ptx::mbarrier_arrive(ptx::shared_address(&shared.dq_empty[0][w])); };
#pragma unroll 1
  for (int i = begin; tile.begin < tile.end && i < end; i += C::kPieceColumns) wait(), pass();
  const int heads = a.p.heads_q / a.p.heads_k;
  for (int head = tile.head * heads; head < (tile.head + 1) * heads; ++head) {
#pragma unroll 1
    for (int block = tile.begin; block < tile.end; ++block) {
#pragma unroll 1
      for (int column = begin; column < end; column += C::kPieceColumns) {
        wait();
        const bool wanted = a.p.dq != nullptr && column < a.p.head_dim;
        const bool in_turn = wanted && turns;
        const int64_t query_tile = statistics_tile(a, tile, head, block);
        int* const turn = a.dq_semaphores + query_tile * C::kCounters + column / C::kPieceColumns;
        if (in_turn) {
          wait_semaphore(turn, semaphore_value<C>(a, tile, block));
          ptx::fence_proxy_async_global();
        }
        if (wanted) {
          ptx::bulk_add_f32(a.dq + (query_tile * C::kHeadDim + column) * 64,
                            ptx::shared_address(shared.dq[0][w]), sizeof(shared.dq[0][w]));
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        pass();
        if (in_turn) {
          ptx::bulk_wait<0>();
          ptx::fence_proxy_async_global();
          ptx::add_release(turn, 1);
        }
      }
    }
  }
  ptx::bulk_wait<0>();
}

}  // namespace flashsci::sm90::bwd
