#include "megacore/buffer/step_control.h"

#include <gtest/gtest.h>

#include <cmath>

namespace megacore::buffer {
namespace {

constexpr StepState kFresh = {
    .step_count = 0.0, .num_skipped = 0.0, .loss_scale = 1.0, .good_steps = 0.0};

StepSums norm_of(double norm) {
  return {.squared_norm = norm * norm, .num_nonfinite = 0.0, .num_tokens = 0.0};
}

constexpr StepSums kBad = {.squared_norm = 0.0, .num_nonfinite = 2.0, .num_tokens = 0.0};

TEST(StepControl, AStepCountsAndIsNotClippedWithinTheLimit) {
  StepState state = kFresh;
  const StepControl control =
      decide_step(state, {.beta1 = 0.5, .beta2 = 0.75, .clip_grad = 10.0}, norm_of(5.0));
  EXPECT_EQ(control.grad_scale, 1.0);
  EXPECT_EQ(control.bias_correction1, 0.5);
  EXPECT_EQ(control.bias_correction2, 0.25);
  EXPECT_EQ(control.is_applied, 1.0);
  EXPECT_EQ(control.grad_norm, 5.0);
  EXPECT_EQ(state.step_count, 1.0);
}

TEST(StepControl, TheLearningRateIsTheCallers) {
  StepState state = kFresh;
  EXPECT_EQ(decide_step(state, {}, norm_of(1.0), 0.25).lr, 0.25);
  EXPECT_EQ(decide_step(state, {}, kBad, 0.5).lr, 0.5);
}

TEST(StepControl, ClippingBringsTheNormDown) {
  StepState state = kFresh;
  const StepControl control = decide_step(state, {.clip_grad = 1.0}, norm_of(4.0));
  EXPECT_NEAR(control.grad_scale, 0.25, 1e-6);
  EXPECT_EQ(control.grad_norm, 4.0);
}

TEST(StepControl, ASkippedStepLeavesTheStepCountAndSoTheBiasCorrections) {
  StepState state = kFresh;
  const StepRules rules = {.beta1 = 0.5, .beta2 = 0.75};
  decide_step(state, rules, norm_of(1.0));
  const StepControl skipped = decide_step(state, rules, kBad);
  EXPECT_EQ(skipped.is_applied, 0.0);
  EXPECT_TRUE(std::isnan(skipped.grad_norm));
  EXPECT_EQ(state.num_skipped, 1.0);
  EXPECT_EQ(decide_step(state, rules, norm_of(1.0)).bias_correction1, 0.75);
  EXPECT_EQ(state.step_count, 2.0);
}

TEST(StepControl, TheLossScaleHalvesAfterAnOverflowAndDoublesAfterManyGoodSteps) {
  StepState state = kFresh;
  state.loss_scale = 8.0;
  const StepRules rules = {.loss_scale_interval = 2.0};
  decide_step(state, rules, kBad);
  EXPECT_EQ(state.loss_scale, 4.0);
  EXPECT_EQ(decide_step(state, rules, norm_of(8.0)).grad_norm, 2.0);
  EXPECT_EQ(state.loss_scale, 4.0);
  EXPECT_EQ(decide_step(state, rules, norm_of(8.0)).grad_scale, 0.25);  // as the backward pass had
  EXPECT_EQ(state.loss_scale, 8.0);
  for (int step = 0; step < 60; ++step) {
    decide_step(state, rules, norm_of(1.0));
  }
  EXPECT_EQ(state.loss_scale, kLargestLossScale);
  for (int step = 0; step < 60; ++step) {
    decide_step(state, rules, kBad);
  }
  EXPECT_EQ(state.loss_scale, 1.0);
}

TEST(StepControl, WithoutAnIntervalTheLossScaleStays) {
  StepState state = kFresh;
  decide_step(state, {}, kBad);
  decide_step(state, {}, norm_of(1.0));
  EXPECT_EQ(state.loss_scale, 1.0);
  EXPECT_EQ(state.good_steps, 0.0);
}

TEST(StepControl, SumsOverTokensAreDividedByTheirNumber) {
  StepState state = kFresh;
  StepSums sums = norm_of(6.0);
  sums.num_tokens = 12.0;
  const StepRules rules = {.num_averaged = 4.0};
  EXPECT_DOUBLE_EQ(decide_step(state, rules, sums).grad_norm, 2.0);
  sums.num_tokens = 0.0;
  EXPECT_DOUBLE_EQ(decide_step(state, rules, sums).grad_scale, 4.0);
}

TEST(StepControl, WholePowersAreThoseOfPow) {
  for (const double base : {0.0, 0.5, 0.9, 0.999}) {
    for (const int exponent : {0, 1, 2, 3, 10, 1000, 123457}) {
      EXPECT_NEAR(whole_power(base, exponent), std::pow(base, exponent), 1e-13)
          << base << "^" << exponent;
    }
  }
}

}  // namespace
}  // namespace megacore::buffer
