"""Choosing a backend: plain data in, a Decision out. Nothing below here imports torch.

Asked       `request` (its values are read in `values`; `model_config` reads a model's),
            `platform` (`platform_text`, `vendors`; found by `probe`), `policy` (the backends
            that it names are found by `naming`, their settings by `options`)
Offered     `card` with the `conditions` of its clauses, brought by `plugins`
One card    `axes` puts a request to a clause; `explaining` says why not, and what would help;
            `libraries` what is not installed; `checking` makes a verdict of it
All cards   `solver`: `groups` (phases that one backend serves together, and who was named),
            `problem`, `eligible` (who serves a group), `openings` (at which page sizes and KV
            dtypes), `search` (the best of these; `pairs` that must not meet)
Answered    `decision`; `verdicts` on all candidates, made when they are read (`deferred`), their
            hints tried out by `remedies`; `refusal` where nothing fits; `outcomes` for people;
            `agreement` of another process
Measured    `measurement`, `measurement_file`, and the ranking of `tuning`; `trials` of a backend's
            launches, and the `launches` that won; `record_file` keeps both
"""
