#include "megacore/pipeline/layer_layout.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "megacore/pipeline/partition.h"
#include "schedule_checks.h"

namespace megacore::pipeline {
namespace {

using Layers = std::vector<int>;

std::string layout_error(const std::string& text) {
  return message_of([&] { layers_of_layout(text); });
}

TEST(LayerLayout, CountsLayersPerStage) {
  EXPECT_EQ(layers_of_layout("EtL"), (Layers{1}));
  EXPECT_EQ(layers_of_layout("EL"), (Layers{0}));
  EXPECT_EQ(layers_of_layout("Et|tt||L"), (Layers{1, 2, 0, 0}));
  EXPECT_EQ(layers_of_layout("E t*3 | (tt|)*2, L"), (Layers{3, 2, 2, 0}));
  EXPECT_EQ(layers_of_layout("Et|*3tL"), (Layers{1, 0, 0, 1}));
  EXPECT_EQ(layers_of_layout("E(t|(tt)*2|)*2(tL)"), (Layers{1, 4, 1, 4, 1}));
  EXPECT_EQ(layers_of_layout("Et * 2 | t , L"), (Layers{2, 1}));
}

TEST(LayerLayout, ReadsTheLayoutOfA61LayerModel) {
  const Layers layers = layers_of_layout("Et*3|(tt|)*29,|L");
  ASSERT_EQ(layers.size(), 32u);
  EXPECT_EQ(layers[0], 3);
  for (size_t stage = 1; stage < 30; ++stage) EXPECT_EQ(layers[stage], 2);
  EXPECT_EQ(layers[30], 0);
  EXPECT_EQ(layers[31], 0);
}

TEST(LayerLayout, MarksTheOffendingCharacter) {
  EXPECT_EQ(layout_error("Ett|xL"),
            "layout \"Ett|>x<L\": unknown; use E (embedding), t (layer), m (layer for multi-token "
            "prediction), L (loss), | (next stage), x*3 and ( )");
  EXPECT_EQ(layout_error("Et*|L"), "layout \"Et>*<|L\": a number must follow '*'");
  EXPECT_EQ(layout_error("E*2tL"), "layout \">E<*2tL\": E may stand at the very start only, once");
  EXPECT_EQ(layout_error("Et*0L"), "layout \"Et>*<0L\": repeat at least once");
  EXPECT_EQ(layout_error("*3EtL"), "layout \">*<3EtL\": '*' must follow what it repeats");
  EXPECT_EQ(layout_error("E(tt|L"), "layout \"E>(<tt|L\": this '(' is not closed");
  EXPECT_EQ(layout_error("Et)|L"), "layout \"Et>)<|L\": this ')' closes no '('");
  EXPECT_EQ(layout_error("tt|tL"), "layout \">t<t|tL\": a layout begins with E, the embedding");
  EXPECT_EQ(layout_error("Et|tL|"),
            "layout \"Et|tL>|<\": a layout ends with L, the output layer and loss");
  EXPECT_EQ(layout_error("EtL|tL"), "layout \"Et>L<|tL\": L may stand at the very end only, once");
  EXPECT_EQ(layout_error("Et|EtL"),
            "layout \"Et|>E<tL\": E may stand at the very start only, once");
  EXPECT_EQ(layout_error(""), "layout \"><\": it is empty; the shortest is \"EtL\"");
}

TEST(LayerLayout, LayersThatPredictFurtherStandBehindAllOthersOnOneStage) {
  const Layers predictions = predictions_of_layout("Et*3|(tt|)*29,m|L");
  ASSERT_EQ(predictions.size(), 32u);
  EXPECT_EQ(predictions[30], 1);
  EXPECT_EQ(std::accumulate(predictions.begin(), predictions.end(), 0), 1);
  EXPECT_EQ(layers_of_layout("Et|tm*2L"), (Layers{1, 1}));
  EXPECT_EQ(predictions_of_layout("Et|tm*2L"), (Layers{0, 2}));
  EXPECT_EQ(predictions_of_layout("Et|t|L"), (Layers{0, 0, 0}));
  EXPECT_EQ(layout_error("Etm|tL"),
            "layout \"Etm|>t<L\": t may not stand behind m, which predicts from the last layer");
  EXPECT_EQ(layout_error("Et|m|mL"), "layout \"Et|m|>m<L\": all m must be on one stage");
  EXPECT_EQ(layout_error("mEtL"), "layout \">m<EtL\": a layout begins with E, the embedding");
}

TEST(LayerLayout, BoundsWhatATextCanGrowTo) {
  EXPECT_NE(layout_error("Et*99999999999999999999L").find("repeat at most"), std::string::npos);
  EXPECT_NE(layout_error("E(((t*1000)*1000)*1000)L").find("more than"), std::string::npos);
  EXPECT_NE(layout_error("Et*60000t*60000L").find("more than"), std::string::npos);
  EXPECT_NE(layout_error("E" + std::string(100000, '(') + "t").find("nested"), std::string::npos);
}

std::string partition_error(const PartitionShape& shape) {
  try {
    partition_layers(shape);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(LayerLayout, TheTotalAlwaysCounts) {
  const std::vector<LayerRange> expected = {{0, 1}, {1, 4}};
  EXPECT_EQ(partition_layers({.num_layers = 4, .num_ranks = 2, .layout = "Et|tttL"}), expected);
  EXPECT_EQ(
      partition_error({.num_layers = 5, .num_ranks = 2, .layout = "Et|tttL"}),
      "layout \"Et|tttL\" has 4 layers (t), but num_layers is 5; add 1, or set num_layers to 4");
  EXPECT_EQ(
      partition_error({.num_layers = 1, .num_ranks = 2, .layout = "Et|tttL"}),
      "layout \"Et|tttL\" has 4 layers (t), but num_layers is 1; take away 3, or set num_layers "
      "to 4");
  EXPECT_EQ(
      partition_error({.num_layers = 4, .num_ranks = 2, .layout = "Et|t|t|tL"}),
      "layout \"Et|t|t|tL\" has 4 stages, but 2 ranks make 2; with 2 chunks per rank it would "
      "fit");
  EXPECT_EQ(
      partition_error({.num_layers = 4, .num_ranks = 3, .num_chunks = 2, .layout = "Et|tttL"}),
      "layout \"Et|tttL\" has 2 stages, but 3 ranks, 2 chunks each make 6");
  EXPECT_EQ(partition_error({.num_layers = 4, .num_ranks = 2, .first = 1, .layout = "Et|tttL"}),
            "layout says where every layer goes; leave out first, last and account_for_*");
}

TEST(LayerLayout, FirstAndLastFollowAV) {
  const PartitionShape shape{
      .num_layers = 14, .num_ranks = 3, .num_chunks = 2, .first = 4, .last = 2, .is_v = true};
  Layers counts;
  for (const LayerRange& range : partition_layers(shape)) counts.push_back(range.end - range.begin);
  EXPECT_EQ(counts, (Layers{2, 4, 1, 1, 4, 2}));
  EXPECT_NE(partition_error({.num_layers = 4, .num_ranks = 2, .is_v = true}).find("2 chunks"),
            std::string::npos);
}

}  // namespace
}  // namespace megacore::pipeline
