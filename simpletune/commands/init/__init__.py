"""``simpletune init``: examine a folder of pictures and the machine, and write a configuration that explains its
choices.

- look.py: examine the folder; answers.py: the user's answers, from options or questions. - suggest.py, choices.py: the
configuration, with a reason for each choice; defaults.py: the numbers behind them. - machine.py: the card, the
prediction for it, and access to the model; command.py: the verb, and ``train FOLDER``.

``suggest`` prints and asks nothing, and imports no torch. May import data_report, doctor, estimate, config and what is
below them. Only the command line and the web page import it.
"""

from simpletune.commands.init.answers import Answers
from simpletune.commands.init.defaults import Reason, Suggestion
from simpletune.commands.init.look import Look, look
from simpletune.commands.init.suggest import suggest

__all__ = ["Answers", "Look", "Reason", "Suggestion", "look", "suggest"]
