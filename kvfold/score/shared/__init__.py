"""Parts that several scorers share: attention maps, column maxima, grouping, position lookup, predictors."""
