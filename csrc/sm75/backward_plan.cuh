// What the host derives from the parameters of a Turing backward, once.
#pragma once
#include "../common/place.cuh"
#include "../common/scores.cuh"
#include "../include/flashsci.h"

namespace flashsci::sm75 {

struct BackwardPlan {
  const float2* statistics;  // [B0, B1, Hq, Sq]: -lse in log2 units, -delta; -inf, 0 without keys
  ScorePlan scores;
  int vector;  // rows of q, k, v, dout take 16-byte loads
  int vector_dq, vector_dk, vector_dv;
  int writes_bias;  // dbias has a place for every pair
};

}  // namespace flashsci::sm75
