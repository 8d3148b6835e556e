"""The properties of the stories: names return, gifts are found with their owner, and a wrong name is found."""

import math
import random
import re

import pytest

from nanoinfer_lab import stories

MANY = 400


@pytest.fixture(scope="module")
def some_stories():
    rng = random.Random(11)
    return [stories.write(rng) for _ in range(MANY)]


@pytest.mark.slow
def test_every_story_can_be_read_and_has_a_similar_probability(some_stories):
    readings = [stories.read(story) for story in some_stories]
    assert all(reading.is_complete for reading in readings)
    assert all(reading.log_prob == pytest.approx(reading.log_prob_of_beginning) for reading in readings)
    assert all(-100 < reading.log_prob < -30 for reading in readings)


def test_the_hero_returns_by_name_far_from_the_first_and_has_the_last_one(some_stories):
    for story in some_stories:
        names = list(stories.NAME.finditer(story))
        hero, returns = names[0], next(name for name in names[1:] if name[0] == names[0][0])
        assert returns.start() - hero.end() > 200, story
        assert names[-1][0] == hero[0], story
        assert len({name[0] for name in names}) <= 2, story


@pytest.mark.slow
def test_a_gift_is_found_with_the_one_who_got_it_and_with_nobody_else(some_stories):
    found = 0
    for story in some_stories:
        memory = stories.read(story).memory
        if "owner" in memory:
            found += 1
            owner = memory["owner"]
            answer = re.search(rf"(belongs to|gave it to|But|found it with) {owner}\b", story)
            assert answer, story
            (loser,) = {str(memory["friend"]), f"the {memory['animal']}"} - {str(owner)}
            wrong = story[: answer.start()] + answer[0].replace(str(owner), loser) + story[answer.end() :]
            reading = stories.read(wrong)
            assert not reading.is_complete
            assert str(owner).split()[0] in reading.expected[0]
    assert found > MANY / 20


def test_a_story_about_a_given_hero_is_more_likely_by_the_choice_of_the_name():
    story = stories.write(random.Random(9), "Felix")
    assert stories.NAME.search(story)[0] == "Felix"
    # There are 24 names, all equally likely.
    assert stories.read(story, "Felix").log_prob - stories.read(story).log_prob == pytest.approx(math.log(24))
    assert not stories.read(story, "Lily").is_complete
    with pytest.raises(ValueError, match="no story is about 'Bob'; the heroes are Lily, Anna"):
        stories.write(random.Random(1), "Bob")


def test_a_wrong_name_late_in_a_story_is_found():
    story = stories.write(random.Random(9), "Felix")
    *_, last = stories.NAME.finditer(story)
    reading = stories.read(story[: last.start()] + "Oscar" + story[last.end() :])
    assert reading.num_chars == last.start()
    assert "Felix" in reading.expected
