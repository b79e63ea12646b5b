"""The viewer of run folders: a local web page (`tunesmith view`), and rollouts in the terminal (`tunesmith show`).

`reading/` reads run folders, `answers/` computes what a page shows as JSON values, `static/` is the page. Nothing is
written to a run folder, and no library of models is imported.
"""
