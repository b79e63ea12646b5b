"""Group-in-group advantages against golden values and worked examples."""

from __future__ import annotations

import pytest

from tunesmith.algorithms.advantages.group import RunOutcome, compute_gigpo_advantages
from tunesmith.errors import ConfigError


def run(reward: float | None, *states: int, **metrics: float) -> RunOutcome:
    """A rollout whose turn t has the prompt (states[t],)."""
    named = {name.replace("_at_", "/"): value for name, value in metrics.items()}
    return RunOutcome(
        reward=reward, num_turns=len(states), turn_prompts=tuple((state,) for state in states), metrics=named
    )


SHARED = [run(1, 1, 2), run(0, 1, 3)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"gamma": 1.0}, [(0.999999, 0.5), (-0.999999, -0.5)]),
        ({"gamma": 0.9}, [(0.949999, 0.5), (-0.949999, -0.5)]),
        ({"gamma": 1.0, "fnorm": "std"}, [(1.414212, 0.707106), (-1.414212, -0.707106)]),
    ],
)
def test_golden_values(args, expected):
    (rows,) = compute_gigpo_advantages([SHARED], **args)
    for row, values in zip(rows, expected, strict=True):
        assert row == pytest.approx(values, abs=2e-6)


def test_epsilon_is_added_to_the_scale_with_and_without_the_standard_deviation():
    """The mean is 0.5 and the deviation of the first state 0.5: 0.5 / 1.25 twice, and with std 0.5 / (0.707 + 0.25)."""
    for fnorm, scale in (("none", 1.0), ("std", 0.5**0.5)):
        (rows,) = compute_gigpo_advantages([SHARED], gamma=1.0, fnorm=fnorm, epsilon=0.25)
        part = 0.5 / (scale + 0.25)
        assert rows[0] == pytest.approx((2 * part, part), rel=1e-12)
        assert rows[1] == pytest.approx((-2 * part, -part), rel=1e-12)


def test_states_of_different_tasks_are_different():
    other = [run(1, 1, 2), run(1, 1, 3)]
    together = compute_gigpo_advantages([SHARED, other], gamma=1.0)
    assert together[0] == compute_gigpo_advantages([SHARED], gamma=1.0)[0]
    assert together[1] == [None, None]


def test_a_state_may_be_visited_twice_in_one_run():
    """One rollout visits state 1 twice: turns closer to the reward have a higher return."""
    (rows,) = compute_gigpo_advantages([[run(1, 1, 1, 2), run(1, 1, 2)]], gamma=0.5, omega=2.0)
    first, second, third = 0.25, 0.5, 0.5
    mean = (first + second + third) / 3
    assert rows[0] == pytest.approx((2 * (first - mean), 2 * (second - mean), 0.0), abs=1e-5)
    assert rows[1] == pytest.approx((2 * (third - mean), 0.0), abs=1e-5)


def test_rewards_and_states_from_metrics():
    runs = [
        run(0, 1, 2, r_at_0=0.5, s_at_0=7, s_at_1=8),
        run(0, 3, 4, r_at_1=1.0, s_at_0=7, s_at_1=9),
    ]
    (rows,) = compute_gigpo_advantages([runs], gamma=1.0, step_reward_key="r", env_state_hash_key="s")
    assert rows[0] == pytest.approx((-0.5, -0.25), abs=1e-5)
    assert rows[1] == pytest.approx((0.5, 0.25), abs=1e-5)
    with pytest.raises(ConfigError, match=r"does not report the metric 's/1'"):
        compute_gigpo_advantages([[run(0, 1, 2, s_at_0=7)]], env_state_hash_key="s")


def test_groups_of_one_failed_rollouts_and_rollouts_without_calls_are_safe():
    assert compute_gigpo_advantages([[run(0.7, 1, 2)], [], [run(None, 1)]]) == [[None], [], [None]]
    assert compute_gigpo_advantages([[run(1.0, 1, 1)]], gamma=0.5)[0][0] == pytest.approx((-0.25, 0.25), abs=1e-5)
    (rows,) = compute_gigpo_advantages([[run(1, 1), run(None, 1), run(0)]])
    assert rows[0] == pytest.approx((0.5,), abs=1e-5) and rows[1:] == [None, ()]


def test_group_with_equal_returns_in_each_state_is_dropped():
    assert compute_gigpo_advantages([[run(1, 1, 2), run(1, 1, 3)]]) == [[None, None]]
    assert compute_gigpo_advantages([[run(1, 1, 2), run(1, 1)]])[0][0] is not None
