// One step of a pipeline rank, as a value with a text form.
//
//   to_text({.stage = 2, .kind = ActionKind::kForward, .microbatch = 0});  // "2F0"
//   parse_action("2RECV_B7");  // stage 2 receives the gradient of its output for microbatch 7
//
// The text form is the cell of PyTorch's pipelining CSV: <stage><KIND><microbatch>.

#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace megacore::pipeline {

enum class ActionKind : uint8_t {
  kForward,         // F: run the stage on one microbatch
  kBackward,        // B: gradients of input and weights together
  kBackwardInput,   // I: gradient of the input only
  kBackwardWeight,  // W: gradient of the weights only, after I
  kSendForward,     // SEND_F: send the stage's output to the next stage
  kRecvForward,     // RECV_F: receive the stage's input from the previous stage
  kSendBackward,    // SEND_B: send the gradient of the stage's input to the previous stage
  kRecvBackward,    // RECV_B: receive the gradient of the stage's output from the next stage
  kRecompute,       // RECOMPUTE: make the activations again that the forward did not keep
};

// Text of each kind, indexed by its value.
inline constexpr std::array<std::string_view, 9> kKindText = {
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "RECOMPUTE"};

struct Action {
  int32_t stage = 0;
  ActionKind kind = ActionKind::kForward;
  int32_t microbatch = 0;

  friend bool operator==(const Action&, const Action&) = default;
};

constexpr bool is_compute(ActionKind kind) { return kind <= ActionKind::kBackwardWeight; }
constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::kSendForward || kind == ActionKind::kSendBackward;
}
constexpr bool is_recv(ActionKind kind) {
  return kind == ActionKind::kRecvForward || kind == ActionKind::kRecvBackward;
}
constexpr bool is_transfer(ActionKind kind) { return is_send(kind) || is_recv(kind); }
// True for the backward kinds that produce the gradient of the stage's input: B and I.
constexpr bool gives_input_gradient(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput;
}
// True for the backward kinds after which the stage's activations are no longer needed: B and W.
constexpr bool frees_activation(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

std::string to_text(const Action& action);
void append_text(const Action& action, std::string& text);

// The whole text must be one action: "2F0 " or "1F0x" throw std::invalid_argument with the text.
Action parse_action(std::string_view text);

}  // namespace megacore::pipeline
