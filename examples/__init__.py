"""Programs that use Lastbit as its users do."""
