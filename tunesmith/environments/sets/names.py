"""Names of the members of packages in the tested releases, known without the packages."""

from __future__ import annotations

REASONING_GYM = """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
    binary_matrix bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio
    coin_flip color_cube_rotation complex_arithmetic count_bits count_primes countdown course_schedule cryptarithm
    decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification
    futoshiki game_of_life game_of_life_halting gcd graph_color group_anagrams gsm_symbolic intermediate_integration
    isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting letter_counting
    letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid n_queens
    needle_haystack number_filtering number_format number_sequence number_sorting palindrome_generation
    palindrome_partitioning path_star polynomial_equations polynomial_multiplication pool_matrix power_function
    prime_factorization products propositional_logic puzzle24 quantum_lock ransom_note rearc rectangle_count
    rotate_matrix rotten_oranges rubiks_cube rush_hour self_reference sentence_reordering shortest_path
    simple_equations simple_geometry simple_integration sokoban spell_backward spiral_matrix string_insertion
    string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals tower_of_hanoi
    tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
""".split()  # noqa: SIM905
SCIENCEWORLD = """
    boil change-the-state-of-matter-of chemistry-mix chemistry-mix-paint-secondary-color
    chemistry-mix-paint-tertiary-color find-animal find-living-thing find-non-living-thing find-plant freeze grow-fruit
    grow-plant identify-life-stages-1 identify-life-stages-2 inclined-plane-determine-angle
    inclined-plane-friction-named-surfaces inclined-plane-friction-unnamed-surfaces lifespan-longest-lived
    lifespan-longest-lived-then-shortest-lived lifespan-shortest-lived measure-melting-point-known-substance
    measure-melting-point-unknown-substance melt mendelian-genetics-known-plant mendelian-genetics-unknown-plant
    power-component power-component-renewable-vs-nonrenewable-energy test-conductivity
    test-conductivity-of-unknown-substances use-thermometer
""".split()  # noqa: SIM905
TEXTARENA = {
    1: """
    2048 Bandit Blackjack Countdown Crosswords Cryptarithm FifteenPuzzle FrozenLake GuessTheNumber LightsOut
    LogicPuzzle MarketEntryGame Mastermind Minesweeper PegJump PublicGoodsGame QuantumTicTacToe RushHour Secretary
    Set Slitherlink Sokoban SpiteAndMalice Sudoku ThreeCardMonte TowerOfHanoi
    """.split(),  # noqa: SIM905
    2: """
    Alquerque Battleship Breakthrough Briscola Chopsticks ColonelBlotto ConnectFour Crusade GameOfPureStrategy
    GermanWhist Golf HighSociety IndianPoker IteratedMatchingPennies IteratedPrisonersDilemma
    IteratedRockPaperScissors IteratedTwoThirdsAverage IteratedUltimatumGame KuhnPoker LiarsDice LinesOfAction
    MemoryGame NewRecruit Nim Othello PigDice Poker SantoriniBaseFixed SimpleBlindAuction SimpleNegotiation
    SimpleTak Snake Stratego Surround Tak TicTacToe TruthAndDeception TwoDollar UltimateTicTacToe WildTicTacToe
    """.split(),  # noqa: SIM905
    3: """
    ThreePlayerGOPS ThreePlayerIPD ThreePlayerTicTacToe
    """.split(),  # noqa: SIM905
}
"""Families of games by their number of players, as far as they run without a network on Python 3.11. The other ones
need another model, data of nltk, which they try to download, a later Python, or files that the release lacks."""
