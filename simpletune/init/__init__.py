"""``simpletune init``: look at a folder of pictures and at the machine, and write a configuration that says why.

- look.py: what is in the folder; answers.py: what the user is asked, and may say instead.
- suggest.py, choices.py: the configuration, with a reason for each choice; defaults.py: the figures behind them.
- machine.py: the card, the prediction for it, and access to the model; command.py: the verb, and ``train FOLDER``.

``suggest`` prints and asks nothing, and imports no torch. May import data_report, doctor, estimate, config and what is
below them. Only the command line and the web page import it.
"""

from simpletune.init.answers import Answers
from simpletune.init.defaults import Reason, Suggestion
from simpletune.init.look import Look, look
from simpletune.init.suggest import suggest

__all__ = ["Answers", "Look", "Reason", "Suggestion", "look", "suggest"]
