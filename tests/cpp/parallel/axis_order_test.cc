#include "megacore/parallel/axis_order.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace megacore::parallel {
namespace {

using Names = std::vector<std::string>;
using Layout = std::vector<AxisSize>;

template <typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no exception";
}

TEST(ParseOrder, KeepsTheWrittenOrder) {
  EXPECT_EQ(parse_order("tp-cp-ep-dp-pp"), (Names{"tp", "cp", "ep", "dp", "pp"}));
  EXPECT_EQ(parse_order("pp-tp"), (Names{"pp", "tp"}));
}

TEST(ParseOrder, NamesTheUnknownAxisAndTheLegalOnes) {
  EXPECT_EQ(message_of([] { parse_order("tp-qq"); }),
            "order \"tp-qq\" has an unknown axis \"qq\"; the axes are tp, cp, ep, dp, pp");
}

TEST(ParseOrder, SuggestsTheAxisThatWasMeant) {
  EXPECT_NE(message_of([] { parse_order("tp-PP"); }).find("did you mean \"pp\"?"),
            std::string::npos);
  EXPECT_NE(message_of([] { parse_order("pt-dp"); }).find("did you mean \"tp\"?"),
            std::string::npos);
}

TEST(ParseOrder, RejectsAPartialNameOfAnAxis) {
  EXPECT_THROW(parse_order("etp-dp"), std::invalid_argument);
  EXPECT_THROW(parse_order("t-dp"), std::invalid_argument);
  EXPECT_THROW(parse_order("tpcp"), std::invalid_argument);
}

TEST(ParseOrder, NamesTheRepeatedAxis) {
  EXPECT_EQ(message_of([] { parse_order("tp-dp-tp"); }),
            "order \"tp-dp-tp\" names axis tp twice; name each axis once, as in \"tp-dp\"");
}

TEST(ParseOrder, RejectsEmptyPieces) {
  for (const char* order : {"", "-", "tp-", "-tp", "tp--dp"}) {
    SCOPED_TRACE(order);
    EXPECT_NE(message_of([order] { parse_order(order); }).find("has an empty piece"),
              std::string::npos);
  }
}

TEST(ParseToken, ChecksAgainstTheLayout) {
  const Layout dense = {{"tp", 2}, {"dp", 2}};
  EXPECT_EQ(parse_token("dp-tp", dense), (Names{"dp", "tp"}));
  EXPECT_EQ(message_of([&] { parse_token("ep", dense); }),
            "token \"ep\" has an unknown axis \"ep\"; the axes are tp, dp");
}

TEST(ParseToken, UnderstandsDenseNamesInAnExpertLayout) {
  const Layout expert = {{"etp", 2}, {"ep", 4}, {"edp", 2}};
  EXPECT_EQ(parse_token("tp-ep", expert), (Names{"etp", "ep"}));
  EXPECT_EQ(parse_token("dp", expert), (Names{"edp"}));
  EXPECT_THROW(parse_token("etp-tp", expert), std::invalid_argument);
}

TEST(Arrange, SortsByOrderAndPutsUnnamedUnitAxesLast) {
  EXPECT_EQ(arrange(Layout{{"tp", 4}, {"cp", 1}, {"dp", 2}, {"pp", 3}}, "pp-dp-tp"),
            (Layout{{"pp", 3}, {"dp", 2}, {"tp", 4}, {"cp", 1}}));
}

TEST(Arrange, PlacesExpertAxesWhereTheDenseOnesStand) {
  EXPECT_EQ(arrange(Layout{{"etp", 1}, {"ep", 4}, {"edp", 2}, {"pp", 2}}, "tp-cp-ep-dp-pp"),
            (Layout{{"etp", 1}, {"ep", 4}, {"edp", 2}, {"pp", 2}}));
}

TEST(Arrange, NamesTheMissingAxisItsSizeAndTheFix) {
  EXPECT_EQ(
      message_of([] { arrange(Layout{{"tp", 2}, {"pp", 4}}, "tp-dp"); }),
      "order \"tp-dp\" lacks pp, but pp has size 4; add it, as in \"tp-dp-pp\", or set pp to 1");
}

TEST(Product, ShowsEachFactor) {
  EXPECT_EQ(product_text(Layout{{"tp", 2}, {"cp", 1}, {"pp", 4}}), "tp 2 x cp 1 x pp 4 = 8");
  EXPECT_EQ(product(Layout{}), 1);
}

TEST(Product, ThrowsInsteadOfOverflowing) {
  EXPECT_THROW(product(Layout{{"tp", int64_t{1} << 40}, {"cp", int64_t{1} << 40}}),
               std::invalid_argument);
}

}  // namespace
}  // namespace megacore::parallel
