// A layer partition as a text, in the notation that Megatron-LM made known.
//
//   layers_of_layout("Et*3|(tt|)*2L")  // {3, 2, 2, 0}: four stages, seven layers
//
//   E        embedding; once, at the very start
//   t        one transformer layer
//   m        one layer that predicts a token further ahead (multi-token prediction); all of them
//            behind the last t, on one stage
//   L        output layer and loss; once, at the very end
//   |        the next stage begins
//   x*3      x three times, x being one of the above or a group
//   ( ... )  a group
//
// Commas and blanks mean nothing. A stage may be empty.

#pragma once

#include <string_view>
#include <vector>

namespace megacore::pipeline {

// The number of layers of each stage, in stage order. Throws std::invalid_argument with the text,
// the offending character marked as >x<, and what would be right: for text outside the notation,
// for E or L missing, repeated or out of place, and for m before a t or on several stages.
std::vector<int> layers_of_layout(std::string_view text);

// The number of layers for multi-token prediction (m) of each stage. Throws likewise.
std::vector<int> predictions_of_layout(std::string_view text);

}  // namespace megacore::pipeline
