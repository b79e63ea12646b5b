"""Training texts that equal an evaluation text or share a long n-gram with one are found."""

from __future__ import annotations

from tunesmith.tasks.contamination import find_overlaps

TEST = ["A plane travels 1200 miles in 3 hours. At the same rate, how long for 2000 miles?", "What is 2 + 2?"]


def find(train, ngram_words=6):
    return [(o.train_index, o.eval_index, o.kind) for o in find_overlaps(train, TEST, ngram_words=ngram_words)]


def test_spacing_case_and_punctuation_do_not_hide_a_copy():
    assert find(["unrelated", "a PLANE travels 1200 miles, in 3 hours; at the same rate how long for 2000 miles"]) == [
        (1, 0, "exact")
    ]


def test_a_shared_ngram_counts_from_ngram_words_on():
    text = "A train goes 360 miles in 3 hours. At the same rate, how far?"  # shares nine words: "miles in ... how"
    assert find([text], ngram_words=9) == [(0, 0, "ngram")]
    assert find([text], ngram_words=10) == []


def test_a_short_evaluation_text_is_found_anywhere_in_a_training_text():
    assert find(["Tom asks: what is 2+2?"]) == [(0, 1, "ngram")]
    assert find(["What is 2 + 3?"]) == []


def test_each_training_text_has_one_overlap_in_order():
    both = f"{TEST[0]} {TEST[1]}"
    assert find([both, TEST[1], "fine", TEST[0]]) == [(0, 0, "ngram"), (1, 1, "exact"), (3, 0, "exact")]


def test_texts_without_words_overlap_with_nothing():
    assert find_overlaps(["", "?!", "a"], ["", "..."], ngram_words=3) == []


def test_the_shared_words_are_returned():
    (overlap,) = find_overlaps(["so at the same rate, how long is it"], TEST, ngram_words=6)
    assert overlap.words == "at the same rate how long"
